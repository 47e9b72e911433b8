"""`dmt doctor --bandwidth`: its processes and its table."""

import os

from pydantic import TypeAdapter

from toolkit.cli.output import Table, output
from toolkit.doctor.bench import tell_on
from toolkit.doctor.calibrate import measured, tell_count, this_machine
from toolkit.engines.distributed import end_process, join, leave
from toolkit.errors import EXIT_DONE, PlanError
from toolkit.extras.doctor.bandwidth import Bandwidth, Rate, measure_here
from toolkit.text.units import seconds

_ACROSS = (
    "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "-m toolkit.cli.main doctor --bandwidth"
)


def measure_bandwidth(processes: int | None, as_json: bool) -> None:
    """Between ranks that are started here; as one of them, where a launcher started them."""
    if "RANK" in os.environ:
        ranks = join()
        found = measure_here(ranks, tell_on(ranks))
        leave()
        if ranks.rank == 0:
            _print_rates(found, as_json)
        end_process(EXIT_DONE)
    machine = this_machine(processes)
    if machine.processes == 1:
        more_here = this_machine(None).processes > 1
        raise PlanError(
            "--bandwidth: one process has no peer to communicate with",
            fix="leave --processes out" if more_here else f"on two machines: {_ACROSS}",
        )
    tell_count(machine)
    rates = measured(machine, "toolkit.extras.doctor.bandwidth")
    _print_rates(TypeAdapter(Bandwidth).validate_python(rates), as_json)


def _print_rates(found: Bandwidth, as_json: bool) -> None:
    output(as_json, found, _lines(found))


def _lines(found: Bandwidth) -> list[str]:
    """A line per operation and size, and what the columns mean."""
    where = f"{found.world} ranks on {found.nodes} machine{'s' * (found.nodes > 1)}"
    nominal = " (nominal: a processor has no data sheet)" if found.gpu == "cpu" else ""
    note = f"{where}, {found.gpu}; peak of the slowest link each way{nominal}"
    return [*_RATES.lines(found.rates), note]


def _of_peak(rate: Rate) -> str:
    peak = rate.peak_bytes_per_s
    return "-" if peak is None else f"{rate.bus_bytes_per_s / peak:.0%}"


_RATES = Table[Rate](
    {
        "operation": lambda rate: rate.operation,
        "MiB": lambda rate: f"{rate.message_bytes / 2**20:.4g}",
        "time": lambda rate: seconds(rate.seconds),
        "algorithm GB/s": lambda rate: f"{rate.algorithm_bytes_per_s / 1e9:.3g}",
        "bus GB/s": lambda rate: f"{rate.bus_bytes_per_s / 1e9:.3g}",
        "peak GB/s": lambda rate: (
            "-" if rate.peak_bytes_per_s is None else f"{rate.peak_bytes_per_s / 1e9:.3g}"
        ),
        "share": _of_peak,
    }
)
