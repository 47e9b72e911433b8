"""`torchrun`: PyTorch's elastic launcher, one agent on each machine.

On one machine, `dmt launch` writes the run directory and restarts a failed run. On several, it
is started on each of them; the agents meet at `launch.rendezvous`, rank 0 plans, and the agents
restart failures.
"""

import importlib.util
import math
import sys
from dataclasses import replace

from toolkit.errors import BackendUnavailable, PlanError
from toolkit.launchers import TORCHRUN
from toolkit.launchers.base import DMT, Job, LaunchSpec, Outcome, spec_of
from toolkit.launchers.foreign import run_guarded
from toolkit.launchers.process import StopSignals
from toolkit.launchers.quiet_agent import ELASTIC

JOIN_LIMIT_S = 600
"""How long an agent waits for the other machines, at the start and after a failure."""
FIRST_CALL_S = 10
"""How long the first meeting of an elastic run waits for more than `min_nodes` machines; one
that comes later is taken in without the loss of a step."""
BEAT_S, BEATS = 2, 3
"""A machine whose agent has been silent for six seconds is lost (torch: 5 s and 3). All ranks
wait for that; an agent has nothing else to do, and is late only where memory runs out."""
_NO_LIMIT_S = 24 * 3600


class TorchrunStarter:
    """`python -m torch.distributed.run`."""

    def spec(self, job: Job) -> LaunchSpec:
        """Return this machine's agent; see Starter."""
        if importlib.util.find_spec("torch") is None:
            raise BackendUnavailable("torchrun: torch is missing", fix="pip install torch")
        agent = (sys.executable, "-m", "torch.distributed.run")
        processes = f"--nproc-per-node={job.cluster.gpus_per_node}"
        if TORCHRUN.supervises(job.launch.most_nodes(job.cluster.nodes)):
            # With its address stated, the machine's name need not resolve.
            here = ("--standalone", "--local-addr=127.0.0.1")
            return spec_of(job, (*agent, *here, processes, *job.train))
        planning = (*DMT, "train", str(job.recipe_file), "--run-dir", str(job.run_dir))
        words = (*agent, *_meeting(job), processes, *planning)
        # In torch 2.13, ranks look for a shared store at the first meeting's rank 0, always.
        env = {ELASTIC: str(job.run_dir), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return spec_of(job, words, files={job.recipe_file: job.recipe}, env=env)

    def run(self, spec: LaunchSpec, signals: StopSignals) -> Outcome:
        """Start the agent, without its traceback, and wait; see Starter."""
        python, _, _, *arguments = spec.argv
        quiet = (python, "-m", "toolkit.launchers.quiet_agent", *arguments)
        if ELASTIC in spec.env:
            quiet = (python, "-m", "toolkit.launchers.elastic_agent", *arguments)
        return run_guarded(replace(spec, argv=quiet), signals)


def _meeting(job: Job) -> tuple[str, ...]:
    """How the agents of several machines find each other, and what they do about failures."""
    rendezvous = job.launch.rendezvous
    if rendezvous is None:
        raise PlanError(
            f"launch.rendezvous: nothing, but cluster.nodes is {job.cluster.nodes}",
            fix="on every machine, with the name of one of them: "
            "--set launch.rendezvous=HOST:29400",
        )
    elastic, nodes, conf = job.launch.elastic, str(job.cluster.nodes), ""
    if elastic is not None:
        nodes = f"{elastic.min_nodes}:{elastic.max_nodes}"
        conf = f",last_call_timeout={FIRST_CALL_S},keep_alive_interval={BEAT_S}"
        conf += f",keep_alive_max_attempt={BEATS}"
    grace_s = math.ceil(min(job.grace_s, _NO_LIMIT_S))
    return (
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous}",
        f"--rdzv-id={job.name}",
        f"--rdzv-conf=join_timeout={JOIN_LIMIT_S},read_timeout={JOIN_LIMIT_S}{conf}",
        f"--max-restarts={job.launch.max_restarts}",
        *(() if elastic is None else (f"--shutdown-timeout={grace_s}",)),
    )
