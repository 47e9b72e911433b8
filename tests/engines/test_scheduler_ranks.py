"""Slurm's and Open MPI's words for a rank become PyTorch's."""

import pytest

from toolkit.engines.scheduler_ranks import first_host, scheduler_ranks
from toolkit.errors import PlanError

STEP = {
    "SLURM_JOB_ID": "12007",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009,20]",
}


def test_a_step_of_srun():
    assert scheduler_ranks(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "20007",
    }
    last = {**STEP, "SLURM_NODEID": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    found = scheduler_ranks(last)
    assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "10.0.0.1")
    assert found["MASTER_PORT"] == "1"


def test_the_batch_script_itself_is_no_rank():
    script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert scheduler_ranks(script) == {}


def test_a_launcher_inside_an_allocation_has_the_word():
    assert scheduler_ranks({**STEP, "RANK": "0"}) == {}


MPI = {
    "open": [
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ],
    "hydra": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}


@pytest.mark.parametrize("names", MPI.values(), ids=MPI)
def test_mpi(names):
    rank = dict(zip(names, ("3", "4", "1", "2"), strict=True)) | {"MASTER_ADDR": "node-1"}
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [scheduler_ranks(rank)[name] for name in ours] == ["3", "4", "1", "2", "node-1"]
    del rank["MASTER_ADDR"]
    with pytest.raises(PlanError, match="env MASTER_ADDR=HOST"):
        scheduler_ranks(rank)
    assert scheduler_ranks({**rank, names[1]: "2"})["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,20],login", "gpu007"),
        ("n[3,5]", "n3"),
        ("rack-1-n[01-02].cluster.org", "rack-1-n01.cluster.org"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first
