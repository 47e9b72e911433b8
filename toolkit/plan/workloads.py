"""The workload of a request: what the cost model computes with."""

from dataclasses import replace

from toolkit.backend import BACKENDS
from toolkit.layout import Pair
from toolkit.plan.cost.workload import Workload, planned_workload
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention, legality


def workload_of(job: PlanRequest, pair: Pair) -> Workload:
    """What is trained, on an engine and a model implementation.

    Without overlap, gradients are reduced after the backward pass, and the pipeline waits for
    every message; on CPUs, whose cores also communicate, the gain of less overlapping
    communication was not measured.
    """
    on_cpus, auto = job.cluster.gpu == "cpu", job.parallel.overlap == "auto"
    pays = not on_cpus or not legality.table()[pair].without_overlap
    spec = job.spec
    workload = planned_workload(
        spec,
        job.training,
        pair,
        # Without a mask a row counts as one document: how long documents are is not known.
        document_mask=job.isolates and attention.kernel(job) != "varlen",
        updates=job.updates,
        reduce_overlap=auto and pays,
        keeps_sent=auto and on_cpus,
        attention="eager" if attention.whole_scores(job) else "fused",
        cudnn=attention.kernel(job) == "cudnn",
        reduce_bytes=BACKENDS[pair.engine].reduce_bytes(job.parallel.zero),
    )
    return workload if job.kernels.fp8 is None else replace(workload, precision="fp8")
