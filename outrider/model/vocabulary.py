"""Whether two models speak the same token ids."""

import hashlib
from collections.abc import Mapping
from typing import Protocol

from outrider.messages import Vocabulary


class HasVocabulary(Protocol):
    """The part of a tokenizer that is needed here."""

    def get_vocab(self) -> dict[str, int]:
        """Return the map from token to id."""
        ...


def vocabulary(tokenizer: HasVocabulary) -> Vocabulary:
    """Return the fingerprint of a tokenizer's map and the length of its id range.

    The model's padded size plays no part: equal maps pair whatever the widths of the logits.
    """
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    digest = hashlib.sha256()
    for token_id, token in by_id:
        encoded = token.encode(errors="surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return Vocabulary(digest.hexdigest(), by_id[-1][0] + 1 if by_id else 0)


def first_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[int, str | None, str | None] | None:
    """Return the lowest id that means different tokens in two maps.

    Args:
        ours: Token -> id.
        theirs: Token -> id.

    Returns:
        (id, our token or None, their token or None), or None when the maps are equal.
    """
    our_ids = {token_id: token for token, token_id in ours.items()}
    their_ids = {token_id: token for token, token_id in theirs.items()}
    differing = (i for i in our_ids.keys() | their_ids.keys() if our_ids.get(i) != their_ids.get(i))
    first = min(differing, default=None)
    return None if first is None else (first, our_ids.get(first), their_ids.get(first))
