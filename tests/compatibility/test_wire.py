"""The wire against that of the oldest revision that is supported, which `recording` wrote down."""

import base64
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from outrider.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2  # noqa: F401  (in the pool by being imported)
from tests.compatibility.recording import FOLDER, filled, kinds, variants

PROTOS = FOLDER.parents[1] / "protos"
SAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "messages.json").read_text(encoding="utf-8"))
KINDS = sorted({sample["kind"] for sample in SAMPLES})


@cache
def old_pool() -> descriptor_pool.DescriptorPool:
    """Return the messages of the oldest revision, beside those of this one."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "oldest.binpb").read_bytes()).file:
        pool.Add(file)
    return pool


def class_of(kind: str, pool: descriptor_pool.DescriptorPool) -> type[Message]:
    return GetMessageClass(pool.FindMessageTypeByName(kind))


def plain(message: Message) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True, use_integers_for_enums=True)


def breaking(protos: Path, against: Path) -> subprocess.CompletedProcess[str]:
    """Run `buf breaking` on a folder of protos, with the project's rules."""
    buf = Path(sys.executable).with_name("buf")
    rules = '{"version":"v2","breaking":{"use":["FILE"]}}'
    command = [str(buf), "breaking", str(protos), "--against", str(against), "--config", rules]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_no_change_since_the_oldest_revision_breaks_the_wire() -> None:
    found = breaking(PROTOS, FOLDER / "oldest.binpb")
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("verify.proto", r"uint32 seen_len = 4;", "uint32 seen_len = 40;"),
        ("draft.proto", r"uint32 max_len = \d+;", ""),
        ("types.proto", r"MODE_COUPLED = 2", "MODE_COUPLED = 22"),
        ("verify.proto", r"rpc Propose\(stream ", "rpc Propose("),
    ],
    ids=["another-number", "removed", "another-value", "no-stream"],
)
def test_a_change_that_breaks_the_wire_is_found(tmp_path: Path, file: str, before: str, after: str) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos")
    path = tmp_path / "protos/outrider/v1" / file
    text, changes = re.subn(before, after, path.read_text(encoding="utf-8"))
    assert changes == 1
    path.write_text(text, encoding="utf-8")
    assert breaking(tmp_path / "protos", FOLDER / "oldest.binpb").returncode != 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_old_service_says_is_understood_as_it_was_meant(kind: str) -> None:
    known = class_of(kind, descriptor_pool.Default())
    for sample in (sample for sample in SAMPLES if sample["kind"] == kind):
        heard = known.FromString(base64.b64decode(sample["bytes"]))
        assert json_format.MessageToDict(heard, preserving_proto_field_name=True) == sample["meant"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_service_hears_all_that_it_knows_of(kind: str) -> None:
    """What this revision has added is missing, and nothing else."""
    new = descriptor_pool.Default().FindMessageTypeByName(kind)
    for number in range(1, variants(new) + 1):
        said = filled(new, number)
        heard = class_of(kind, old_pool()).FromString(said.SerializeToString())
        known = {field.name for field in heard.DESCRIPTOR.fields}
        assert_within(plain(heard), plain(said), f"{kind}, {number}")
        assert {name for name in plain(said) if name in known} == set(plain(heard))


def assert_within(heard: Any, said: Any, where: str) -> None:
    """Require that everything heard was said, at its place."""
    match heard:
        case dict():
            for name, value in heard.items():
                assert_within(value, said[name], f"{where}.{name}")
        case list():
            assert len(heard) == len(said), where
            for index, value in enumerate(heard):
                assert_within(value, said[index], f"{where}[{index}]")
        case _:
            assert heard == said, where


def test_all_messages_of_the_oldest_revision_are_recorded_and_still_there() -> None:
    assert set(KINDS) <= {kind.full_name for kind in kinds()}
    assert len(SAMPLES) > len(KINDS) > 40
