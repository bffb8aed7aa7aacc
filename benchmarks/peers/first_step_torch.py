"""torch.distributed.pipelining from launch to the end of the first step; see startup.py."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, BATCH, MICROBATCHES = 512, 64, 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    module = nn.Sequential(*layers)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    if rank == 0:
        schedule.step(torch.randn(BATCH, WIDTH), return_outputs=False)
    else:
        schedule.step(target=torch.randn(BATCH, WIDTH), return_outputs=False)
    optimizer.step()
    Path(f"{sys.argv[1]}.{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
