"""`slurm`: a batch job in which every machine runs `dmt launch`.

The job's script makes no decisions: it sets the rendezvous machine, passes Slurm's warning on
to the run, and requeues the job if the run stopped before its end.
"""

import shlex
from collections.abc import Iterator

from toolkit.errors import EXIT_RESUMABLE, PlanError
from toolkit.launchers.base import DMT, PORTS, Job, LaunchSpec, submit
from toolkit.launchers.process import StopSignals
from toolkit.system.interpreter import python

_OF_ANY_JOB = ("partition", "account", "qos", "time")
"""Options that a node which joins the run needs, too."""
_UNQUOTABLE = frozenset('"\\%\n')
"""Characters with a special meaning for Slurm in a quoted path of a directive."""


class SlurmStarter:
    """`sbatch`. Returns when the job is queued."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return the submission, with script and recipe as its files. See Starter."""
        if bad := sorted(_UNQUOTABLE & set(str(job.run_dir))):
            raise PlanError(
                f"the run directory {str(job.run_dir)!r} has {bad[0]!r} in its name, which "
                "Slurm does not accept",
                fix="--run-dir OTHER",
            )
        script = job.run_dir / "launch" / "job.sbatch"
        return LaunchSpec(
            argv=("sbatch", str(script)),
            run_dir=job.run_dir,
            files={
                job.recipe_file: job.recipe,
                script: "\n".join([*_directives(job), "", *_script(job)]) + "\n",
            },
        )

    def run(self, spec: LaunchSpec, signals: StopSignals) -> int:
        """Submit. Raises BackendUnavailable without `sbatch`."""
        del signals
        # Slurm does not create the folder of a job's output; the job would fail silently.
        (spec.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        return submit("slurm", spec, f"on the cluster: {shlex.join(spec.argv)}")


def _directives(job: Job) -> Iterator[str]:
    """The `#SBATCH` lines, which Slurm reads and the shell does not."""
    theirs = _options(job)
    yield "#!/bin/bash"
    options = {
        "job-name": job.name,
        "nodes": _nodes(job),
        # With a number of tasks, Slurm takes `min_nodes`; without, `srun` starts one a node.
        "ntasks-per-node": 1 if job.launch.elastic is None else None,
        "gpus-per-node": _gpus(job),
        # Seconds before the time limit, only to the script (B), which passes it on.
        "signal": "B:USR1@300",
        # Every job of an array has its own id (%j); %A_%a is undefined outside an array.
        "output": f'"{job.run_dir}/logs/slurm-%j.log"',
        "open-mode": "append",
    }
    for name, value in options.items():
        if value is not None and name not in theirs:
            yield f"#SBATCH --{name}={value}"
    if _requeues(job):
        yield "#SBATCH --requeue"
    if job.launch.elastic is not None:
        yield "#SBATCH --no-kill"
    for option in job.launch.slurm.options:
        yield f"#SBATCH {option}"


def _gpus(job: Job) -> int | None:
    """GPUs of a node. None on CPUs."""
    return None if job.cluster.gpu == "cpu" else job.cluster.gpus_per_node


def _requeues(job: Job) -> bool:
    """Whether a job that stopped before its end is queued again."""
    return "no-requeue" not in _options(job)


def _options(job: Job) -> dict[str, str]:
    """The recipe's options of sbatch, by name without dashes."""
    return {option[2:].partition("=")[0]: option for option in job.launch.slurm.options}


def _nodes(job: Job) -> str:
    """How many nodes the job is for. An elastic one starts with those that are free."""
    elastic = job.launch.elastic
    if elastic is None:
        return str(job.cluster.nodes)
    return f"{elastic.min_nodes}-{elastic.max_nodes}"


def _script(job: Job) -> Iterator[str]:
    """What the shell runs, every value of the recipe quoted."""
    command = shlex.join(
        (*python(), *DMT, "launch", str(job.recipe_file), "--run-dir", str(job.run_dir))
    )
    log = shlex.quote(f"{job.run_dir}/logs/slurm-%j-%N.log")
    yield "set -u"
    if job.launch.most_nodes(job.cluster.nodes) > 1:
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        # Jobs of neighbouring numbers take different ones.
        yield f"port=$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"
        launcher = '--launcher local --set launch.rendezvous="$head:$port"'
    else:
        launcher = "--launcher local"
    yield ""
    yield "# One `dmt launch` a machine, each with a log of its own."
    stated = _options(job)
    # `srun` does not take the job's.
    cpus = f" {shlex.quote(stated['cpus-per-task'])}" if "cpus-per-task" in stated else ""
    start = f"srun --output={log} --open-mode=append --kill-on-bad-exit=0{cpus}"
    if job.launch.elastic is not None:
        yield "# In steps of their own: one on all ends when a lost node is back without it."
        yield 'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do'
        start += ' --nodes=1 --ntasks=1 --nodelist="$node"'
    yield f"{start} \\"
    yield f"  {command} \\"
    yield f"  {launcher} &"
    if job.launch.elastic is None:
        yield "run=$!"
    else:
        yield 'run="$! ${run-}"'
        yield "done"
        yield "printf 'another node joins by'  # Slurm adds none to a running job"
        asked = [stated[name] for name in _OF_ANY_JOB if name in stated]
        asked += [] if (gpus := _gpus(job)) is None else [f"--gpus-per-node={gpus}"]
        options = shlex.join(asked)
        yield f"printf ' %q' srun --nodes=1 {options}{cpus} {command} {launcher}; echo"
    yield "again=no"
    yield "trap 'again=yes; kill -USR1 $run' USR1"
    yield "# srun passes USR1 on; at TERM it would kill."
    yield "trap 'kill -USR1 $run' TERM"
    yield "# A trapped signal ends `wait` early: wait until the run itself has ended."
    yield "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done"
    if _requeues(job):
        yield ""
        yield "# Saved and stopped as its time was over: queue it again (not after `scancel`)."
        yield f'if [ "$code" -eq {EXIT_RESUMABLE} ] && [ "$again" = yes ]; then'
        yield '  scontrol requeue "$SLURM_JOB_ID"'
        yield "fi"
    yield 'exit "$code"'
