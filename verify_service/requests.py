"""What a verifier accepts from its callers: pure checks against the model it serves."""

from outrider.errors import FailedPrecondition, InvalidRequest, VocabularyMismatch
from outrider.messages import DecodeOpen, ProposeHello, Vocabulary
from outrider.parameters import validate
from verify_service.workers import LAST_HIDDEN


def check_open(opened: DecodeOpen, vocab_len: int, context_len: int) -> None:
    """Refuse a session that this model cannot decode.

    Raises:
        InvalidRequest: names the field, its value and the allowed range.
    """
    for at, token in enumerate(opened.token_ids):
        if not 0 <= token < vocab_len:
            raise InvalidRequest(f"open.token_ids[{at}]", token, f"a token id in 0 .. {vocab_len - 1}")
    if len(opened.token_ids) > context_len:
        raise InvalidRequest("open.token_ids", f"{len(opened.token_ids)} tokens", f"at most {context_len} tokens")
    if not 1 <= opened.prompt_len <= len(opened.token_ids):
        raise InvalidRequest("open.prompt_len", opened.prompt_len, f"an integer in 1 .. {len(opened.token_ids)}")
    check_limit("open.commit_limit", opened.commit_limit, context_len)
    validate(opened.sampling, vocab_len)


def check_limit(field: str, commit_limit: int, context_len: int) -> None:
    """Refuse a limit past the context: the session would stand still before it.

    Raises:
        InvalidRequest: names the field, its value and the allowed range.
    """
    if commit_limit > context_len:
        raise InvalidRequest(field, commit_limit, f"at most the context's {context_len} tokens")


def check_hello(hello: ProposeHello, vocabulary: Vocabulary) -> None:
    """Refuse a draft worker that speaks other ids, or wants features that a pass does not return.

    Raises:
        VocabularyMismatch: the token -> id maps differ.
        FailedPrecondition: a feature layer other than the last.
    """
    theirs = hello.vocabulary
    if theirs.fingerprint != vocabulary.fingerprint:
        raise VocabularyMismatch(
            f"the map of draft worker {hello.worker_id} ({theirs.size} ids, {theirs.fingerprint[:12]}) is not the "
            f"target's ({vocabulary.size} ids, {vocabulary.fingerprint[:12]})"
        )
    others = [layer for layer in hello.feature_layers if layer != LAST_HIDDEN]
    if others or len(hello.feature_layers) > 1:
        raise FailedPrecondition(f"feature layers {hello.feature_layers}: only ({LAST_HIDDEN},) can be had")
