"""What two heavy clients get from the HTTP door, as JSON: run by a Python that has them, which need not have Outrider.

Usage: client.py litellm URL | client.py lm-eval URL FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

MESSAGES = [{"role": "user", "content": "a mat. "}]


def ask_litellm(url: str) -> dict[str, Any]:
    """Ask for the same answer in several ways."""
    import litellm  # noqa: PLC0415 - only one of the two need be there

    known: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 20}
    body = {"ignore_eos": True, "outrider": {"gamma": 2}}
    chat = litellm.completion("openai/toy", MESSAGES, extra_body=body, **known)
    stream = litellm.completion("openai/toy", MESSAGES, extra_body=body, stream=True, **known)
    text = litellm.text_completion(
        "the cat sat on ", model="text-completion-openai/toy", extra_body={"ignore_eos": True}, **known
    )
    return {
        "chat": chat.choices[0].message.content,
        "finish_reason": chat.choices[0].finish_reason,
        "completion_tokens": chat.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "text": text.choices[0].text,
    }


def run_lm_eval(url: str, folder: Path) -> dict[str, Any]:
    """Run the task whose files are in a folder."""
    from lm_eval import simple_evaluate  # noqa: PLC0415 - as above
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    made = simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{url}/v1/completions",
            "model": "toy",
            "tokenizer": str(folder / "tokenizer"),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_length": 2048,
        },
        tasks=["small_choice"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(made["samples"]["small_choice"], key=lambda each: each["doc_id"])
    return {
        "acc": made["results"]["small_choice"]["acc,none"],
        "scores": [[float(score) for score, _ in each["filtered_resps"]] for each in samples],
    }


if __name__ == "__main__":
    kind, url, *rest = sys.argv[1:]
    found = ask_litellm(url) if kind == "litellm" else run_lm_eval(url, Path(rest[0]))
    print("RESULT " + json.dumps(found))
