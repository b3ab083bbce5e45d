"""Trainer with a fault: it averages gradients that data parallelism has already summed."""

from __future__ import annotations

from workers.meter.rank_exit import run_and_exit
from workers.trainer.__main__ import main
from workers.trainer.parallel.data_parallel import BucketedAllReduce

finish = BucketedAllReduce.after_backward


def averaging(parallel: BucketedAllReduce) -> None:
    finish(parallel)
    for bucket in parallel._buckets:
        for parameter in bucket:
            assert parameter.grad is not None
            parameter.grad.div_(2)


if __name__ == "__main__":
    BucketedAllReduce.after_backward = averaging  # type: ignore[method-assign]
    run_and_exit(main)
