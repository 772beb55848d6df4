"""Writes down what the wire of a revision is: `python -m tests.compatibility.recording`, in that revision's tree.

`oldest.binpb` is its proto files as descriptors. `messages.json` has messages of every kind, with every field set that
can be, as they were written then and as they were meant.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from outrider.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2

FOLDER = Path(__file__).parent
FILES = (types_pb2, generation_pb2, verify_pb2, draft_pb2)
MAX_DEPTH = 6


def filled(kind: Descriptor, number: int = 1, depth: int = 0) -> Message:
    """Return a message with every field set; of a oneof the `number`-th member."""
    made: Message = GetMessageClass(kind)()
    for index, own in enumerate(kind.fields):
        oneof = own.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[number % len(oneof.fields)] is not own:
            continue
        _set(made, own, number + index, depth)
    return made


def _set(made: Message, own: FieldDescriptor, number: int, depth: int) -> None:
    if own.type == FieldDescriptor.TYPE_MESSAGE:
        if depth < MAX_DEPTH:
            _set_message(made, own, number, depth)
        return
    value = _value(own, number)
    if own.is_repeated:
        getattr(made, own.name).extend([value, value])
    else:
        setattr(made, own.name, value)


def _set_message(made: Message, own: FieldDescriptor, number: int, depth: int) -> None:
    kind: Any = own.message_type
    if kind.GetOptions().map_entry:
        entries = getattr(made, own.name)
        value = kind.fields_by_name["value"]
        if value.type == FieldDescriptor.TYPE_MESSAGE:
            entries["a"].CopyFrom(filled(value.message_type, number, depth + 1))
        else:
            entries["a"] = _value(value, number)
        return
    part = filled(kind, number, depth + 1)
    if own.is_repeated:
        getattr(made, own.name).add().CopyFrom(part)
    else:
        getattr(made, own.name).CopyFrom(part)


def _value(own: FieldDescriptor, number: int) -> Any:
    match own.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return b"\x01\x02" if own.type == FieldDescriptor.TYPE_BYTES else f"{own.name}-{number}"
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return number + 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            values: Any = own.enum_type
            return values.values[number % len(values.values)].number
        case _:
            return number + 1


def kinds() -> list[Descriptor]:
    """Return every message of the protocol."""
    return [kind for file in FILES for kind in file.DESCRIPTOR.message_types_by_name.values()]


def variants(kind: Descriptor) -> int:
    """Return how many messages show every member of every oneof."""
    return max([1, *(len(oneof.fields) for oneof in kind.oneofs)])


def write(protos: Path) -> None:
    """Write both files."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(protos), "--include_imports"]
    files = sorted(map(str, protos.glob("outrider/v1/*.proto")))
    subprocess.run([*command, f"--descriptor_set_out={FOLDER / 'oldest.binpb'}", *files], check=True)
    descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "oldest.binpb").read_bytes())
    samples = [
        {"kind": kind.full_name, "bytes": base64.b64encode(made.SerializeToString(deterministic=True)).decode(),
         "meant": json_format.MessageToDict(made, preserving_proto_field_name=True)}
        for kind in kinds()
        for made in (filled(kind, number) for number in range(1, variants(kind) + 1))
    ]  # fmt: skip
    text = json.dumps(samples, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / "messages.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parents[2] / "protos")
