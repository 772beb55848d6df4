// Where a token came from, and why there are no drafts: the words for what the server says in labels.

/** By label: the letter in the text, the name, and what it means. */
export const ORIGINS = {
  accepted: { letter: "A", name: "accepted draft", means: "guessed by the draft worker, confirmed by the target" },
  recovered: { letter: "R", name: "recovered", means: "drawn by the target in place of a guess it rejected" },
  bonus: { letter: "B", name: "bonus", means: "drawn by the target behind guesses that were all right" },
  plain: { letter: "P", name: "plain", means: "drawn by the target where nothing was guessed" },
};

const REASONS = {
  no_worker: "There is no draft worker in the cluster: the verifier decodes every token by itself, one pass for each.",
  requested: "The request asks for no drafts.",
  max_tokens: "The request is for one token: there is nothing to guess ahead.",
  no_drafter: "No draft worker is free for the session: the verifier decodes every token by itself.",
  drafter_context: "The session is longer than any draft worker can hold.",
  drafter_not_offered: "No draft worker offers the drafter that the request names.",
  drafter_set_aside: "Every drafter was measured slower than plain decoding, and is set aside for now.",
  vocabulary: "The draft workers speak other tokens than the verifier.",
  below_plain: "Drafting was measured slower than plain decoding here; it is tried again from time to time.",
  passes_full: "The verifier’s passes are full: other sessions’ tokens bring more there than guesses would.",
  earlier_sessions: "Earlier sessions measured the drafter slower than plain decoding, and a trial would take long.",
  nothing_drafted: "The drafter had no guess in time for this text so far; it is asked again from time to time.",
  configured: "The operator has switched drafting off.",
  drafter_handshake_failed: "The draft worker’s certificate is not accepted, or ours is not by it.",
  drafter_slow: "The draft worker was too slow several times in a row.",
  drafter_stuck: "The draft worker takes no messages.",
  drafter_draining: "The draft worker is stopping.",
  drafter_quarantined: "The draft worker sent what it may not, and is left out of the session.",
  drafter_unavailable: "The draft worker cannot be reached.",
  drafter_moved: "The session is on its way to another draft worker.",
};

/** Return why speculation is off, as a sentence; a label that is new here stands for itself. */
export function whyOff(reason) {
  return REASONS[reason] ?? `Speculation is off: ${reason.replaceAll("_", " ")}.`;
}

/** Return what is known of an origin; one that is new here, or was not told, is no origin. */
export function originOf(kind) {
  return ORIGINS[kind] ?? { letter: "?", name: "of unknown origin", means: "" };
}
