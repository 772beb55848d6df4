"""The same prompts in one process: `transformers`, and our models with draft and target on the same core."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.one_process import Ask, OneProcess, Steps
from benchmarks.serving import Cores

NAMES = {PROMPT_LOOKUP: "prompt lookup", CAUSAL_LM: "layer subset"}

Decode = Callable[[Ask, int], Awaitable[Steps]]


@dataclass(slots=True)
class AloneArm:
    """A way of decoding without services, and its repetitions."""

    name: str
    cores: str
    gamma: int
    """Tokens per guess; 0: none."""
    decode: Decode
    rates: list[float] = field(default_factory=list)
    num_tested: int = 0
    num_accepted: int = 0

    async def repeat(self, prompts: Sequence[Ask], num_tokens: int) -> None:
        """Decode every prompt, one after the other; count tokens after the first step, as the other arms do."""
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            steps = await self.decode(prompt, num_tokens)
            tokens += sum(steps.counts[1:])
            seconds += steps.times_s[-1] - steps.times_s[0]
            self.num_tested += steps.num_tested
            self.num_accepted += steps.num_accepted
        self.rates.append(tokens / seconds)

    def cells(self, plain_rate: float) -> tuple[str, ...]:
        """As text, in the order of `ALONE_HEADER`."""
        return (
            self.name,
            self.cores,
            str(self.gamma or ""),
            f"{median(self.rates):.1f} ({min(self.rates):.1f} … {max(self.rates):.1f})",
            f"{median(self.rates) / plain_rate:.2f}",
            f"{self.num_accepted / self.num_tested:.2f}" if self.num_tested else "",
        )


ALONE_HEADER = ("in one process", "cores", "gamma", "tokens/s: median (lowest … highest)", "to our plain", "alpha")


async def alone_arms(stack: AsyncExitStack, cores: Cores, gammas: Mapping[str, int]) -> list[AloneArm]:
    """Start the processes, and return every arm.

    Args:
        stack: ends the processes.
        cores: the first process takes the verifier's core, the second one both.
        gammas: tokens per guess of each draft: those of its sequential arm.
    """
    one = await stack.enter_async_context(OneProcess(cores.verify, 1))
    two = await stack.enter_async_context(OneProcess(cores.both, 2))
    arms = [
        AloneArm("transformers, plain", cores.verify, 0, _stock(one, "", 0)),
        AloneArm("transformers, plain", cores.both, 0, _stock(two, "", 0)),
    ]
    for draft, gamma in gammas.items():
        arms += [
            AloneArm(f"transformers, {NAMES[draft]}", cores.verify, gamma, _stock(one, draft, gamma)),
            AloneArm(f"transformers, {NAMES[draft]}", cores.both, gamma, _stock(two, draft, gamma)),
            AloneArm(f"ours, {NAMES[draft]}", cores.verify, gamma, _ours(one, draft, gamma)),
        ]
    return arms


def _stock(process: OneProcess, draft: str, gamma: int) -> Decode:
    return lambda prompt, num_tokens: process.generate([prompt], num_tokens, draft, gamma)


def _ours(process: OneProcess, draft: str, gamma: int) -> Decode:
    return lambda prompt, num_tokens: process.together(prompt, num_tokens, draft, gamma)
