"""Every engine of DMT on one GPU against transformers' Trainer with Liger and against a loop
with torchtitan's settings: tokens/s and MFU.

    python benchmarks/gpu.py [--shape 1b | 8b | tiny] [--pairs 3] [--steps 30]
        [--engines ddp,fsdp] [--precision bf16 | fp32] [--layers N] [--out RESULT.json]

In each of `--pairs` rounds every side runs once, alone on the GPU, in an order that is turned
around every second time; quoted is the median of the ratios within a round. A step time is that
from the end of the first step to the end of the last. Needs liger-kernel.

1b: Llama 3.2 1B. 8b: layers of Llama 3.1 8B, four of them, so that weights, fp32 masters and
moments fit on 80 GB; --layers changes it. tiny: for a machine without a GPU, to try this
program: the Trainer is then without Liger, whose kernels are the GPU's.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pairs

from toolkit.backend import BACKENDS
from toolkit.doctor.calibrate import check_known, this_machine

LOOPS = {"trainer": "trainer_loop.py", "torchtitan's settings": "titan_loop.py"}
"""What DMT is compared with, and its program."""
LOCAL = (
    "data.train={kind: text, files: ['{stdlib}/*.py']}", "data.tokenizer=bytes",
    "training.tokens=null", "model.hub=null",
)  # fmt: skip
LONG = ("training.sequence_length=8192", "training.global_batch_size=8")


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    recipe: Path
    overrides: tuple[str, ...]


SHAPES = {
    "1b": Shape(
        Path("recipes/llama/llama-3.2-1b-pretrain.yaml"),
        (*LOCAL, *LONG, "training.micro_batch_size=2"),
    ),
    "8b": Shape(
        Path("recipes/llama/llama-3.1-8b-pretrain.yaml"),
        (*LOCAL, *LONG, "training.micro_batch_size=1"),
    ),
    "tiny": Shape(
        pairs.RECIPE,
        ("training.global_batch_size=8", "training.micro_batch_size=4",
         "parallel.zero.stage=auto"),
    ),
}  # fmt: skip


@dataclass
class Rounds:
    """What ran so far."""

    shape: Shape
    overrides: tuple[str, ...]
    """Those of this machine and of the command line."""
    steps: int
    engines: Sequence[str]
    step_s: list[dict[str, float]] = field(default_factory=list)
    """By round and side."""
    mfu: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """One more round."""
        sides = [*self.engines]
        for place, name in enumerate(LOOPS, 1):  # between the engines
            sides.insert(2 * place - 1, name)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # The loops read a run directory: that of the engine without a configuration.
            times = {side: self._alone(folder, side) for side in self._in_turn(sides)}
        self.step_s.append(times)
        shown = ", ".join(f"{side} {1e3 * seconds:.1f} ms" for side, seconds in times.items())
        print(f"round {len(self.step_s)}: {shown}", flush=True)

    def _in_turn(self, sides: list[str]) -> list[str]:
        first, *rest = sides  # writes the run directory that the loops read
        return [first, *(rest[::-1] if len(self.step_s) % 2 else rest)]

    def _alone(self, folder: Path, side: str) -> float:
        """Seconds of a step of one side."""
        with ExitStack() as ends:
            if side in LOOPS:
                started = pairs.loop(folder / self.engines[0], LOOPS[side], self.steps, 1)
            else:
                where, change = folder / side, f"parallel.engine={side}"
                where.mkdir()
                overrides = (*self.shape.overrides, *self.overrides, change)
                started = pairs.dmt(where, self.shape.recipe, overrides, self.steps)
            run = ends.enter_context(started)
            while not run.turn(inf):
                pass
            run.end()
            if side not in LOOPS:
                self._note_mfu(folder / side / "dmt", side)
            return run.ran_s / (self.steps - 1)

    def _note_mfu(self, run_dir: Path, side: str) -> None:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        values = [json.loads(line)["mfu"] for line in lines[1:]]
        if None not in values:
            self.mfu.setdefault(side, []).append(statistics.median(values))

    def result(self) -> dict[str, Any]:
        """Ratios and medians, ready for JSON."""
        sides = [*self.engines, *LOOPS]
        step_s = {side: statistics.median(one[side] for one in self.step_s) for side in sides}
        return {
            "milliseconds_per_step": {side: round(1e3 * s, 2) for side, s in step_s.items()},
            "mfu_dmt": {side: round(statistics.median(v), 4) for side, v in self.mfu.items()},
            **{
                f"tokens_per_s_ratio_dmt_to_{loop}": {
                    engine: pairs.median_and_all(
                        [one[loop] / one[engine] for one in self.step_s]
                    )
                    for engine in self.engines
                }
                for loop in LOOPS
            },
        }


def show(result: Mapping[str, Any], engines: Sequence[str]) -> None:
    """A line per engine and loop."""
    for engine in engines:
        shown = f"{engine:<12}{result['milliseconds_per_step'][engine]:>9.1f} ms"
        if engine in result["mfu_dmt"]:
            shown += f"  MFU {result['mfu_dmt'][engine]:.1%}"
        for loop in LOOPS:
            ratio = result[f"tokens_per_s_ratio_dmt_to_{loop}"][engine]["median"]
            shown += f"  {ratio:.3f} × {loop}"
        print(shown)


def main() -> None:
    parser = pairs.parser(__doc__)
    machine = this_machine(1)
    check_known(machine)
    parser.set_defaults(pairs=3, steps=30)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, help="of the model; 8b: 4, else all")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--engines", help="NAME,NAME; default: all")
    options = parser.parse_args()
    if (options.shape == "tiny") != (machine.gpu == "cpu"):
        parser.error(f"--shape {options.shape}: found {machine.gpu}; tiny is for processors")
    layers = options.layers or (4 if options.shape == "8b" else None)
    here = (
        "cluster.nodes=1", "cluster.gpus_per_node=1", f"cluster.gpu={machine.gpu}",
        f"training.precision={options.precision}", "parallel.recompute=none",
        "schedule.warmup_steps=0",
        *([f"model.config.num_hidden_layers={layers}"] if layers else []),
    )  # fmt: skip
    engines = options.engines.split(",") if options.engines else sorted(BACKENDS.names)
    shape = SHAPES[options.shape]
    rounds = Rounds(shape, here, options.steps, engines)
    for _ in range(options.pairs):
        rounds.run()
    result = rounds.result()
    show(result, engines)
    stated = {"gpu": machine.gpu, "shape": options.shape, "layers": layers}
    packages = ["torch", "transformers", "accelerate", "deepspeed", "megatron-core"]
    packages += ["liger-kernel"] if machine.gpu != "cpu" else []
    pairs.report({**stated, "precision": options.precision, **result}, packages, options.out,
                 shape.recipe)  # fmt: skip


if __name__ == "__main__":
    main()
