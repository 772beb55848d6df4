// Which part of an answer's text belongs to which token.
//
// The text as the server sends it is the truth; the tokens' own bytes only tell where to cut it. A character may be
// spread over several tokens, a token may show as nothing, and the end of a text may be held back for a while: whatever
// comes, the pieces together are exactly the text.

/** Cuts the text of a stream of chunks. */
export class Cutter {
  #decoder = new TextDecoder();

  /**
   * Return one piece of text for each token of a chunk; joined they are the chunk's text, if it has tokens at all.
   * @param {string} text of the chunk.
   * @param {number[][]} tokens bytes of each token, or null where they are not known.
   */
  cut(text, tokens) {
    if (!tokens.length) return [];
    let rest = text;
    const pieces = tokens.map((bytes) => {
      const own = bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : "";
      const piece = rest.startsWith(own) ? own : "";
      rest = rest.slice(piece.length);
      return piece;
    });
    pieces[pieces.length - 1] += rest;
    return pieces;
  }
}
