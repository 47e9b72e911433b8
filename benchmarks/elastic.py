"""Elastic runs of 60 steps: a host is cut off, and another one joins later.

Every trial starts on two hosts (network namespaces, one rank each). After a random step one is
cut off its network; after a later random step a third one joins. In half of the trials the
machines meet on the second host, and the first one is cut, which has rank 0. Steps are so
short that the run is stopped (SIGSTOP) while the third host starts. Compared are the losses of
all steps with those of a run that nothing happens to. Idle is the time between the last step on
the hosts before and the first step on the hosts after.

    python benchmarks/elastic.py                             # as root; about 40 minutes
    python benchmarks/elastic.py --out FILE [--first 4 --trials 4]

With `--out`, trials are added to those that are in the file.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.conftest import Project, write_project
from tests.e2e.elastic_run import SETTINGS, elastic_run
from tests.e2e.product import events, records
from tests.e2e.two_hosts import HOSTS, THIRD, TwoHosts, two_hosts

STEPS = 60
SEED = 34
RUN = {"training.steps": STEPS}


def undisturbed(project: Project) -> dict[int, float]:
    """The losses of a run on two ranks of this machine."""
    project.launch("undisturbed", {**SETTINGS, **RUN, "cluster.gpus_per_node": 2})
    lines = records(project.folder / "undisturbed" / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines}


def trial(
    hosts: TwoHosts, project: Project, expected: dict[int, float], number: int
) -> dict[str, Any]:
    """One run; the host that was cut gets its network back at the end."""
    chance = random.Random(f"{SEED} {number}")
    cut_at = chance.randint(2, 30)
    joins_at = chance.randint(cut_at + 3, 40)
    meet, lost = HOSTS if number % 2 == 0 else HOSTS[::-1]
    began = time.monotonic()
    with elastic_run(hosts, project, f"trial-{number}", meet) as run:
        for host in HOSTS:
            run.join(host, RUN)
        run.reach(cut_at)
        with run.cut(lost):
            run.reach(joins_at)
            with run.paused(meet):
                run.join(THIRD, RUN)
                run.wait_for(lambda: run.has_met(THIRD), "the third host")
            codes = {host: run.end(host).code for host in (meet, THIRD)}
        printed = run.printed()
    resized = events(run.run_dir, "resize")
    repeated = sum(one["dropped_metrics_lines"] for one in events(run.run_dir, "resume"))
    differences = [abs(run.losses[s] / expected[s] - 1) for s in expected if s in run.losses]
    finished = set(codes.values()) == {0} and set(run.losses) == set(expected)
    finished &= [(one["from"], one["to"]) for one in resized] == [(2, 1), (1, 2)]
    if not finished:
        print(printed, file=sys.stderr)
    return {
        "trial": number,
        "cut": "rank 0" if lost == HOSTS[0] else "rank 1",
        "cut_at": cut_at,
        "joins_at": joins_at,
        "finished": finished,
        "resized": [f"{one['from']} to {one['to']}" for one in resized],
        "repeated_steps": repeated,
        "largest_relative_difference": max(differences, default=None),
        "idle_s": [run.idle_s(one) for one in resized],
        "seconds": round(time.monotonic() - began, 1),
    }


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all trials."""
    idle = {
        event: sorted(
            one["idle_s"][number]
            for one in trials
            if one["finished"] and one["idle_s"][number] is not None
        )
        for number, event in enumerate(("cut", "join"))
    }
    return {
        "trials": len(trials),
        "finished": sum(one["finished"] for one in trials),
        "largest_relative_difference": max(
            one["largest_relative_difference"] for one in trials
        ),
        "most_repeated_steps": max(one["repeated_steps"] for one in trials),
        "idle_s": {
            event: {"median": statistics.median(all_s), "largest": all_s[-1]}
            for event, all_s in idle.items()
            if all_s
        },
    }


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    if asked.out is not None and asked.out.exists():
        found = json.loads(asked.out.read_text())["trials"]
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        write_project(Path(folder))
        project = Project(Path(folder))
        expected = undisturbed(project)
        for number in range(asked.first, asked.first + asked.trials):
            found.append(trial(hosts, project, expected, number))
            print(found[-1], file=sys.stderr, flush=True)
            if asked.out is not None:
                result = {"summary": summary(found), "trials": found}
                asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
