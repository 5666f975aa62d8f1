# SPDX-License-Identifier: Apache-2.0
"""When gathers go by copy engines: versions, backends, nodes, pools. The gathers themselves: tests/gpu/test_groups_gpu.py."""
import contextlib
from types import SimpleNamespace as NS

import pytest
import torch
from vllm.distributed import copy_engines
from vllm.distributed.copy_engines import empty_for_gathers, prefer_copy_engines

pytestmark = pytest.mark.base("v0.33.0")

CPU = torch.device("cpu", 0)


class Backend:
    mem_allocator = "NCCL's"

    def __init__(self):
        self.registered = []

    def register_mem_pool(self, pool, symm):
        self.registered.append((pool, symm))


class DeviceGroup:
    def __init__(self, name):
        self.name, self.backend = name, Backend()

    def _get_backend(self, device):
        return self.backend


@pytest.fixture
def nccl(monkeypatch):
    """A PyTorch with NCCL 2.28, whose groups are recorded. `inside`: whether memory comes out of the pool that is in use."""
    fake = NS(version=(2, 28, 9), log=[], nodes=[True, True], inside=True, others=True, ordinals=[0, 1], access={(0, 1)})

    class Options:
        def __init__(self):
            self.config = NS(cta_policy="default", max_ctas=None)

    class Pool:
        def __init__(self, allocator):
            self.allocator, self.used = allocator, False

        def snapshot(self):
            return [{"address": 0, "total_size": 2**63}] if fake.inside else [{"address": 1, "total_size": 2}]

    @contextlib.contextmanager
    def use(pool):
        pool.used = True
        yield

    def new_group(ranks, backend, timeout, pg_options):
        fake.log.append(("new", tuple(ranks), backend, pg_options.config.cta_policy, pg_options.config.max_ctas))
        return DeviceGroup(f"new {ranks}")

    def all_reduce(x, group, op=None):
        if group == "cpu":  # with a rank whose facts are `others`
            assert op == dist.ReduceOp.MIN
            x.clamp_(max=int(fake.others))
        else:
            fake.log.append(("all_reduce", group.name))

    def all_gather(parts, mine, group):
        assert group == "cpu" and len(parts) == len(fake.ordinals)
        for part, ordinal in zip(parts, fake.ordinals):
            part.fill_(ordinal)

    dist = copy_engines.dist
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: (device.index, peer) in fake.access)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: fake.version)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    fake.process_group = NS(NCCL_CTA_POLICY_ZERO="zero", Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake.process_group, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: fake.log.append(("destroy", group.name)))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(copy_engines, "in_the_same_node_as", lambda group: fake.nodes)
    monkeypatch.setattr(copy_engines.logger, "info_once", lambda message, *args: fake.log.append(message % args))
    return fake


def group(backend="nccl", rank=3):
    return NS(torch_distributed_backend=backend, world_size=2, device_communicator=None, device_group=DeviceGroup("stock"), cpu_group="cpu", rank=rank, group_ranks=[[0, 1], [2, 3]],
              device=CPU, unique_name="ckv_prefetch:0")  # fmt: skip


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("rank, own", [(1, [0, 1]), (3, [2, 3])])
def test_every_rank_creates_all_groups_and_keeps_its_own(nccl, backend, rank, own):
    mine = group(backend, rank)
    prefer_copy_engines(mine)
    assert mine.device_group.name == f"new {own}"
    assert nccl.log == [
        ("new", (0, 1), "nccl", "zero", 16),
        ("new", (2, 3), "nccl", "zero", 16),
        ("destroy", "stock"),
        ("all_reduce", f"new {own}"),
    ]


def no_policy(nccl):
    del nccl.process_group.NCCL_CTA_POLICY_ZERO


def old_nccl(nccl):
    nccl.version = (2, 27, 7)


UNSUPPORTED = [("gloo", None, "the backend is gloo"), ("nccl", old_nccl, "NCCL 2.27.7 has none, 2.28 has"), ("nccl", no_policy, "NCCL 2.28.9 has none")]


@pytest.mark.parametrize("backend, change, why", UNSUPPORTED)
def test_without_support_nothing_changes(nccl, backend, change, why):
    if change:
        change(nccl)
    mine = group(backend)
    prefer_copy_engines(mine)
    assert mine.device_group.name == "stock" and nccl.log == []
    memory, pool, copy_engines, waits_on_sms = empty_for_gathers((3, 5), CPU, mine)
    assert (memory.shape, memory.dtype, pool, copy_engines) == ((3, 5), torch.uint8, None, False)
    (line,) = nccl.log
    assert line.startswith("ckv_prefetch:0 does not gather by copy engines: ") and why in line


def test_a_device_communicator_is_refused(nccl):
    mine = group()
    mine.device_communicator = object()
    with pytest.raises(AssertionError):
        prefer_copy_engines(mine)


def test_memory_is_registered(nccl):
    mine = group()
    memory, pool, copy_engines, waits_on_sms = empty_for_gathers((3, 5), CPU, mine)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((3, 5), torch.uint8, True)
    assert pool.used and pool.allocator == "NCCL's"
    assert mine.device_group.backend.registered == [(pool, True)] and copy_engines
    assert nccl.log == ["ckv_prefetch:0 gathers by copy engines."]


@pytest.mark.parametrize("ordinals", [[0, 0], [0, 5]])
def test_peers_that_this_process_does_not_see(nccl, ordinals):
    """A launcher shows each rank only its own GPU: NCCL will find a way or not."""
    nccl.ordinals, nccl.access = ordinals, set()
    assert empty_for_gathers((3, 5), CPU, group()).copy_engines


def refused(nccl, why):
    mine = group()
    assert not empty_for_gathers((3, 5), CPU, mine).copy_engines
    assert mine.device_group.backend.registered == []
    assert nccl.log == [f"ckv_prefetch:0 does not gather by copy engines: {why}."]


def test_several_nodes(nccl):
    nccl.nodes = [True, False]
    refused(nccl, "its ranks are on several nodes")


@pytest.mark.parametrize("mine, others", [(False, True), (True, False)])
def test_no_direct_access_on_any_rank(nccl, mine, others):
    """The same on all ranks: where a layer begins to gather depends on it."""
    nccl.access, nccl.others = {(0, 1)} if mine else set(), others
    refused(nccl, "its GPUs lack direct access to each other's memory")


def test_memory_that_sleep_mode_frees(nccl):
    """NCCL's allocator would keep it: its kernels instead, which wait on SMs."""
    used = []

    @contextlib.contextmanager
    def pool():
        used.append("enter")
        yield
        used.append("leave")

    memory = empty_for_gathers((3, 5), CPU, group(), pool)
    assert used == ["enter", "leave"] and not memory.copy_engines and memory.waits_on_sms and memory.pool is None
    assert nccl.log == ["ckv_prefetch:0 does not gather by copy engines: sleep mode is to free its memory."]


def test_what_waits_on_sms(nccl):
    """NCCL's kernels do, between GPUs that reach each other, where others wait for each other inside kernels, too."""
    assert not empty_for_gathers((3, 5), CPU, group()).waits_on_sms
    nccl.version = (2, 27, 7)
    assert empty_for_gathers((3, 5), CPU, group()).waits_on_sms
    assert not empty_for_gathers((3, 5), CPU, group("gloo")).waits_on_sms
    nccl.nodes = [True, False]
    assert empty_for_gathers((3, 5), CPU, group()).waits_on_sms
    nccl.nodes, nccl.access = [True, True], set()
    assert not empty_for_gathers((3, 5), CPU, group()).waits_on_sms


@pytest.mark.parametrize("mine, others", [(False, True), (True, False)])
def test_memory_of_another_pool_on_any_rank_is_not_registered(nccl, monkeypatch, mine, others):
    """Or some ranks would wait for the others in a collective."""
    nccl.inside = mine

    def is_in(*args, is_in=copy_engines._is_in):
        nccl.others = others  # from now on: they do reach their peers
        return is_in(*args)

    monkeypatch.setattr(copy_engines, "_is_in", is_in)
    refused(nccl, "another memory pool is in use")
