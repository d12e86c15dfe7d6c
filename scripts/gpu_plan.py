"""What `gpu_bench.py` measures, and in which order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qinfer.benchmark import Case
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat
from qinfer.quant.spec import SCHEMES

TRANSFORMERS = "transformers"
NEW_TOKENS = 64
PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Test:
    """A case of `qinfer.benchmark`.

    Attributes:
        case: What is measured.
        graphs: Whether steps are captured as graphs.
        sampled: Whether tokens are drawn, as the preset `chat` does; else greedy.
    """

    case: Case
    graphs: bool = True
    sampled: bool = False

    def __str__(self) -> str:
        its, bits = self.case, self.case.kv_format
        kv = str(bits.k_bits) if bits.k_bits == bits.v_bits else str(bits)
        end = ("" if self.graphs else ", no graph") + (", sampled" if self.sampled else "")
        return f"{its.phase} {its.tokens}, depth {its.depth}, batch {its.batch}, kv {kv}{end}"


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured on one model.

    Attributes:
        shape: A key of `gpu_models.SHAPES`.
        scheme: A key of `qinfer.quant.spec.SCHEMES`, or `transformers`.
        tests: In this order.
        least_s: It is begun only if so much time is left.
    """

    shape: str
    scheme: str
    tests: tuple[Test, ...] = ()
    least_s: float = 20.0

    @property
    def name(self) -> str:
        """Model and scheme."""
        return f"{self.shape} {self.scheme}"

    @property
    def place(self) -> str:
        """Its model's directory."""
        return f"{self.shape}-{self.scheme}"

    @property
    def keys(self) -> list[str]:
        """Of all that it measures."""
        if self.scheme == TRANSFORMERS:
            return [self.name]
        return [f"{self.name} memory", *(f"{self.name} {test}" for test in self.tests)]


def decode(
    batch: int = 1, depth: int = 0, kv: int = 16, *, graphs: bool = True, sampled: bool = False
) -> Test:
    """Of new tokens."""
    return Test(Case("decode", NEW_TOKENS, depth, batch, KVFormat(kv, kv)), graphs, sampled)


def prefill(kv: int = 16) -> Test:
    """Of a prompt."""
    return Test(Case("prefill", PREFILL_TOKENS, 0, 1, KVFormat(kv, kv)))


def jobs() -> list[Job]:
    """Everything, the goals first."""
    deep = [decode(depth=depth, kv=kv) for depth in (4096, 16384) for kv in (16, 8, 4)]
    wide = [decode(batch, depth, kv=8) for depth in (4096, 16384) for batch in (4, 16)]
    small = (decode(), decode(16), prefill(), decode(depth=16384, kv=8))
    return [
        Job(
            "8b",
            "int4",
            (decode(), decode(16), decode(graphs=False), prefill(), decode(sampled=True)),
        ),
        Job("8b", "int8", (decode(), prefill())),
        Job("8b", "bf16", (decode(), prefill())),
        Job("8b", "int4", tuple(decode(depth=16384, kv=kv) for kv in (16, 8, 4))),
        Job("8b", TRANSFORMERS, least_s=25.0),
        Job("8b", "nf4", (decode(), prefill(), decode(16), decode(4))),
        Job("8b", "int4", (decode(4), *deep, prefill(kv=8), *wide)),
        *(Job("1.1b", scheme, small, least_s=12.0) for scheme in SCHEMES),
        Job("8b", "int8", (decode(16), decode(4), *deep, *wide)),
        Job("8b", "bf16", (decode(16), decode(4), *deep, *wide)),
        Job("8b", "nf4", (*deep, *wide)),
        Job("8b", "int4", (decode(4, 4096), decode(16, 4096), decode(16, 16384, kv=4))),
    ]


def tiny(job: Job) -> Job:
    """The same with few tokens."""

    def shrunk(test: Test) -> Test:
        case = test.case
        tokens = {"decode": 4, "prefill": BLOCK_TOKENS}[case.phase]
        depth = {0: 0, 4096: BLOCK_TOKENS, 16384: 2 * BLOCK_TOKENS}[case.depth]
        return dataclasses.replace(test, case=dataclasses.replace(case, tokens=tokens, depth=depth))

    return dataclasses.replace(job, tests=tuple(map(shrunk, job.tests)), least_s=0.0)
