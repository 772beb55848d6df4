"""Heavy clients of OpenAI's API, litellm and lm-eval, in a process of their own.

`HARNESS_PYTHON` names a Python that has them; `make clients` makes one.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.generation import ChatMessage, ChatPrompt, GenerationRequest, PromptLogprobs, TextPrompt, TokenPrompt
from outrider.messages import SamplingParams, TokenLogprobs
from tests.integration.cluster_bench import Bench, hear
from tests.integration.http_door import Door, door

PYTHON = os.environ.get("HARNESS_PYTHON", sys.executable)
FOLDER = Path(__file__).parent / "harness"
LIMIT_S = 110
GREEDY = SamplingParams(temperature=0.0)

pytestmark = [pytest.mark.slow]


def require(module: str) -> None:
    """Skip where a client is not installed."""
    found = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, timeout=LIMIT_S, check=False)
    if found.returncode:
        pytest.skip(f"{PYTHON} has no {module}: run `make clients`, or set HARNESS_PYTHON")


@pytest.fixture
async def opened(valkey_url: str) -> AsyncIterator[Door]:
    async with Bench(valkey_url) as bench, door(bench) as made:
        yield made


async def client(*arguments: str, cwd: Path) -> Any:
    """Run the client, and return what it found."""
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        PYTHON, str(FOLDER / "client.py"), *arguments, cwd=cwd, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, errors.decode()[-3000:]
    line = next(line for line in output.decode().splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


async def test_litellm_gets_the_texts_of_grpc(opened: Door, tmp_path: Path) -> None:
    require("litellm")
    found = await client("litellm", opened.url, cwd=tmp_path)
    spoken = ChatPrompt((ChatMessage("user", "a mat. "),))
    known: dict[str, Any] = {"max_tokens": 20, "sampling": GREEDY, "ignore_eos": True}
    chat = await hear(opened.grpc, GenerationRequest(spoken, **known))
    text = await hear(opened.grpc, GenerationRequest(TextPrompt("the cat sat on "), **known))
    assert found == {
        "chat": chat.text,
        "streamed": chat.text,
        "finish_reason": "length",
        "completion_tokens": 20,
        "text": text.text,
    }


async def test_lm_eval_scores_choices_as_the_models_own_log_probabilities_do(opened: Door, tmp_path: Path) -> None:
    require("lm_eval")
    _write_task(tmp_path)
    found = await client("lm-eval", opened.url, str(tmp_path), cwd=tmp_path)
    docs = [json.loads(line) for line in (FOLDER / "small_choice.jsonl").read_text().splitlines()]
    right = 0
    for doc, scores in zip(docs, found["scores"], strict=True):
        wanted = [await _score(opened, doc["question"], choice) for choice in doc["choices"]]
        assert scores == pytest.approx(wanted, abs=1e-6)
        right += max(range(len(wanted)), key=wanted.__getitem__) == doc["answer"]
    assert found["acc"] == pytest.approx(right / len(docs))


async def _score(opened: Door, question: str, choice: str) -> float:
    """Return the log-probability of a choice after a question, asked over gRPC.

    The harness counts the white space between the two to the choice.
    """
    context, whole = _ids(question.rstrip()), _ids(question + choice)
    request = GenerationRequest(TokenPrompt(tuple(whole)), max_tokens=1, sampling=GREEDY, num_prompt_logprobs=0)
    heard = await hear(opened.grpc, request)
    parts = [event for event in heard.events if isinstance(event, PromptLogprobs)]
    told: list[TokenLogprobs | None] = [each for part in parts for each in part.logprobs]
    assert len(told) == len(whole)
    return sum(each.logprob for each in told[len(context) :] if each is not None)


def _ids(text: str) -> list[int]:
    """Return a text's bytes as the toy's ids, as the harness's tokenizer does."""
    return [byte + 1 for byte in text.encode()]


def _write_task(folder: Path) -> None:
    """Write the task with its data, and a tokenizer of `transformers` that knows the toy's bytes."""
    data = folder / "small_choice.jsonl"
    data.write_text((FOLDER / "small_choice.jsonl").read_text())
    (folder / "small_choice.yaml").write_text(
        "task: small_choice\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        'target_delimiter: ""\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n'
    )
    alphabet = _alphabet()
    vocabulary = {"<eos>": 0} | {alphabet[byte]: byte + 1 for byte in range(256)}
    parts = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": 0, "content": "<eos>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
        ],
        "pre_tokenizer": parts, "decoder": parts,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "dropout": None, "unk_token": None},
    }  # fmt: skip
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 4096}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


def _alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
