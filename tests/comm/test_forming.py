"""Groups that their members form alone."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups

from gpipe_hpc.comm.forming import Former


def test_members_alone_form_a_group_whatever_others_they_have(processes, tmp_path):
    def body(rank):
        former = Former("mine", timedelta(seconds=30), "gloo")
        total = torch.ones(1)
        if rank > 0:
            for _ in range(rank - 1):
                former.form((rank,))  # the ranks need not have formed as many
            dist.all_reduce(total, group=former.form((1, 2)))
        return total.item()

    assert processes(3, body, tmp_path) == [1, 2, 2]


def test_a_group_is_not_split_off_from_one_that_its_user_bound_to_a_device(processes, tmp_path):
    """NCCL would have all ranks of the world take part in that; only the members come."""
    device = torch.device("cuda", 0)

    def body(rank):
        default, seen = torch_groups._get_default_group(), []
        default.bound_device_id = device
        form = torch_groups._new_process_group_helper

        def spy(*args, **kwargs):
            seen.append((default.bound_device_id, kwargs.get("device_id")))
            return form(*args, **kwargs)

        torch_groups._new_process_group_helper = spy
        group = Former("mine", timedelta(seconds=30), "gloo").form((0, 1))
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        return total.item(), seen, default.bound_device_id == device

    assert processes(2, body, tmp_path) == [(2, [(None, None)], True)] * 2
