"""How the store's records look in Redis: packed token ids, and hashes of short texts.

Fields that a reader does not know are ignored, fields that are missing have their default: versions may be mixed.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, NamedTuple

from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, FinishReason, Generation, Mode, TokenClass, WorkerId
from outrider.messages import Grammar, GrammarKind, SamplingParams, Vocabulary, WorkerDescription
from outrider.store.errors import StateUnreadable
from outrider.store.records import KvLocation, SessionState, SessionStatus

_CLASS_OF = {int(token_class): token_class for token_class in TokenClass}


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Pack ids as little-endian 32-bit unsigned integers, 4 bytes each.

    Raises:
        ValueError: an id is negative, 2**32 or more, or no integer.
    """
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers in 0 .. 2**32 - 1: {error}") from error


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Undo `pack_ids`."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_classes(classes: Sequence[int]) -> bytes:
    """Pack token classes, one byte each.

    Raises:
        ValueError: a value is no `TokenClass`.
    """
    if not _CLASS_OF.keys() >= set(classes):
        raise ValueError(f"token classes must be among {sorted(_CLASS_OF)}")
    return bytes(classes)


def unpack_classes(packed: bytes) -> tuple[TokenClass, ...]:
    """Undo `pack_classes`.

    Raises:
        StateUnreadable: a byte is no class this version knows.
    """
    try:
        return tuple(map(_CLASS_OF.__getitem__, packed))
    except KeyError as error:
        raise StateUnreadable(f"the session log holds the unknown token class {error}") from error


class _Codec(NamedTuple):
    """One field's way to bytes and back."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _text(value: str) -> bytes:
    return value.encode()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _integer(value: int) -> bytes:
    return b"%d" % value


def _decode_sampling(raw: bytes) -> SamplingParams:
    known = _known(SamplingParams, json.loads(raw))
    if "logit_bias" in known:
        known["logit_bias"] = tuple((int(token), float(bias)) for token, bias in known["logit_bias"])
    for name in ("allowed_token_ids", "end_token_ids", "grammar_end_ids"):
        if name in known:
            known[name] = tuple(map(int, known[name]))
    if known.get("grammar") is not None:
        grammar = _known(Grammar, known["grammar"])
        known["grammar"] = Grammar(GrammarKind(grammar["kind"]), grammar["text"])
    return SamplingParams(**known)


def _decode_choice(raw: bytes) -> SpeculationChoice:
    return SpeculationChoice(**_known(SpeculationChoice, json.loads(raw)))


_TEXT = _Codec(_text, bytes.decode)
_INTEGER = _Codec(_integer, int)

_FIELDS: Mapping[str, _Codec] = {
    "model": _TEXT,
    "owner": _TEXT,
    "mode": _Codec(_integer, lambda raw: Mode(int(raw))),
    "prompt_len": _INTEGER,
    "max_tokens": _INTEGER,
    "sampling": _Codec(lambda value: _json(_changed(value)), _decode_sampling),
    "seed": _Codec(_json, json.loads),
    "key": _Codec(bytes, bytes),
    "sample_index": _INTEGER,
    "num_logprobs": _INTEGER,
    "num_prompt_logprobs": _INTEGER,
    "processed_logprobs": _Codec(_json, lambda raw: bool(json.loads(raw))),
    "stop_strings": _Codec(_json, lambda raw: tuple(json.loads(raw))),
    "stop_ids": _Codec(_json, lambda raw: tuple(json.loads(raw))),
    "speculation": _Codec(lambda value: _json(_changed(value)), _decode_choice),
    "drafter_kind": _TEXT,
    "prediction": _Codec(pack_ids, unpack_ids),
    "return_origin": _Codec(_json, lambda raw: bool(json.loads(raw))),
    "request_id": _TEXT,
    "skip_special_tokens": _Codec(_json, lambda raw: bool(json.loads(raw))),
    "fingerprint": _TEXT,
    "status": _Codec(lambda value: _text(value.value), lambda raw: SessionStatus(raw.decode())),
    "finish_reason": _Codec(_json, lambda raw: None if raw == b"null" else FinishReason(int(raw))),
    "verifier_id": _TEXT,
    "draft_id": _TEXT,
}


def encode_fields(values: Mapping[str, Any]) -> list[bytes | str]:
    """Return field, value, field, value … for HSET.

    Raises:
        ValueError: a name is no field of `SessionState`, or a value does not fit its field.
    """
    pairs: list[bytes | str] = []
    for name, value in values.items():
        if name not in _FIELDS:
            raise ValueError(f"SessionState has no field {name!r}")
        try:
            pairs += [name, _FIELDS[name].encode(value)]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"SessionState.{name} cannot hold {value!r}") from error
    return pairs


def encode_state(state: SessionState) -> list[bytes | str]:
    """Return field, value … of a whole state; fields that hold their default are left out.

    Raises:
        ValueError: a value does not fit its field.
    """
    return encode_fields({f.name: getattr(state, f.name) for f in fields(state) if not _is_default(state, f)})


def decode_state(raw: Mapping[bytes, bytes]) -> SessionState:
    """Read a state back from its hash.

    Raises:
        StateUnreadable: a required field is missing, or a known field cannot be read.
    """
    try:
        return SessionState(**{n: codec.decode(raw[n.encode()]) for n, codec in _FIELDS.items() if n.encode() in raw})
    except (TypeError, ValueError) as error:
        raise StateUnreadable(f"the session state cannot be read: {error}") from error


def encode_location(location: KvLocation) -> bytes:
    """Return prefix length, fence, attach, round; the server adds the time. Empty for an empty prefix."""
    epoch = location.epoch
    if location.prefix_len == 0:
        return b""
    return b"%d %d %d %d" % (location.prefix_len, epoch.generation.fence, epoch.generation.attach, epoch.round)


def decode_location(worker_id: bytes, raw: bytes) -> KvLocation:
    """Read one entry of the KV directory; numbers that a later version appends are ignored.

    Raises:
        StateUnreadable: fewer than five numbers.
    """
    try:
        prefix_len, fence, attach, round_, used_ms = map(int, raw.split()[:5])
    except ValueError as error:
        raise StateUnreadable(f"the KV directory holds {raw!r}") from error
    epoch = Epoch(Generation(fence, attach), round_)
    return KvLocation(WorkerId(worker_id.decode()), prefix_len, epoch, used_ms / 1000)


def encode_worker(worker: WorkerDescription) -> bytes:
    """Return a description as JSON."""
    return _json(asdict(worker))


def decode_worker(raw: bytes) -> WorkerDescription:
    """Read a description back.

    Raises:
        StateUnreadable: no JSON object, or a required field is missing.
    """
    try:
        known = _known(WorkerDescription, json.loads(raw))
        known["vocabulary"] = Vocabulary(**_known(Vocabulary, known["vocabulary"]))
        known["drafters"] = tuple(known.get("drafters", ()))
        return WorkerDescription(**known)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StateUnreadable(f"a worker's description in the registry cannot be read: {error!r}") from error


def _known(cls: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a dataclass."""
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in raw.items() if name in names}


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass value that differ from their default."""
    changed = {f.name: getattr(value, f.name) for f in fields(value) if not _is_default(value, f)}
    return {name: asdict(own) if isinstance(own, Grammar) else own for name, own in changed.items()}


def _is_default(value: Any, f: Any) -> bool:
    """Whether a field of a dataclass value holds its default."""
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    return bool(getattr(value, f.name) == default)
