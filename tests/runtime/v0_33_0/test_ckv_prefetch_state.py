# SPDX-License-Identifier: Apache-2.0
"""The state machine of the CKV prefetch, model checked on a simulated GPU: every order in which the streams can run is tried."""
import itertools
import subprocess
import sys
import weakref

import pytest

from tests.runtime.v0_33_0._prefetch_lane import SOURCE, BufferState, CKVPrefetchState, Device, FakeStreams, Lane, LayerKey, ckv_prefetch, layer_key

pytestmark = [pytest.mark.base("v0.33.0")]


def subsets(layers):
    return [s for n in range(1, len(layers) + 1) for s in itertools.combinations(layers, n)]


def run(steps, machine=CKVPrefetchState):
    """One lane; `steps`: for each step (layers, lookahead), or "rebind"."""
    device = Device()
    lane = Lane(device, machine=machine)
    for step, what in enumerate(steps):
        if what == "rebind":
            lane.rebind()
            continue
        layers, lookahead = what
        for layer in layers:
            lane.layer(layer, step, lookahead)
    return device, lane


ALL = (0, 1, 2)
WARM = (ALL, True)


# ------------------------------------------------------------------------------------------------ model checks


@pytest.mark.parametrize("first", subsets(ALL), ids=str)
def test_every_interleaving_of_two_steps_and_three_layers(first):
    """After a step that discovers all layers: two steps of any of the three layers, each with and without history."""
    states = 0
    for second in subsets(ALL):
        for lookahead in itertools.product((True, False), repeat=2):
            device, _ = run([WARM, (first, lookahead[0]), (second, lookahead[1])])
            wrong, seen = device.explore()
            assert wrong is None
            assert device.races() is None
            states += seen
    assert states > 1000


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_every_layer_but_the_first_is_prefetched(layers):
    """Odd or even, the last layer of a step leaves nothing behind for the next."""
    device, lane = run([(range(layers), True)] * 3)
    assert lane.prefetched == [False] * layers + 2 * ([False] + [True] * (layers - 1))
    assert device.explore()[0] is None
    assert [lane.machine.state_of(b) for b in (0, 1)] == [BufferState.FREE] * 2


def merges(a, b):
    """All ways to do the items of `a` and `b`, each in its order."""
    for places in itertools.combinations(range(len(a) + len(b)), len(a)):
        rest_a, rest_b = iter(a), iter(b)
        yield [next(rest_a) if i in places else next(rest_b) for i in range(len(a) + len(b))]


def two_lanes(merged_steps, machine=CKVPrefetchState):
    device = Device()
    lanes = {name: Lane(device, name, machine) for name in "ab"}
    for step, merged in enumerate(merged_steps):
        for lane, layer in merged:
            lanes[lane].layer(layer, step)
    return device, lanes


def test_two_lanes_in_every_host_order():
    """Two steps of three layers in two lanes that share the main stream; the lanes' layers interleaved in all ways."""
    a, b = [("a", layer) for layer in ALL], [("b", layer) for layer in ALL]
    orders = list(merges(a, b))
    assert len(orders) == 20
    for first, second in itertools.product(orders, repeat=2):
        device, lanes = two_lanes([a + b, first, second])
        assert device.races() is None
        assert all(lane.prefetched[3:] == [False, True, True] * 2 for lane in lanes.values())


@pytest.mark.parametrize("order", list(merges("aaa", "bbb")), ids="".join)
def test_two_lanes_every_interleaving(order):
    """The same, every order of the three streams. Bound: both steps have the same host order."""
    layers = {"a": itertools.cycle(ALL), "b": itertools.cycle(ALL)}
    merged = [(lane, next(layers[lane])) for lane in order]
    device, _ = two_lanes([[(lane, layer) for lane in "ab" for layer in ALL], merged, merged])
    assert device.explore()[0] is None


@pytest.mark.parametrize("before", [((0,), True), ((0, 1), True), WARM], ids=str)
def test_rebind_drains(before):
    """A gather in flight, of a layer that never ran, ends before the host frees what it reads."""
    device, lane = run([WARM, before, "rebind", WARM, WARM])
    assert device.explore()[0] is None
    assert lane.prefetched[-6:] == [False] * 4 + [True] * 2


def moved(machine=CKVPrefetchState):
    """The model moves to another stream that waited for the cache writes, but not for the last attention."""
    device = Device()
    lane = Lane(device, machine=machine)
    for layer in ALL:
        lane.layer(layer, 0)
    event = device.record("main")
    # The last attention of "main" is still to run: move it behind the event.
    queue = device.queues["main"]
    attention = max(i for i, op in enumerate(queue) if op[0] == "work")
    queue[attention], queue[-1] = queue[-1], queue[attention]
    release = max(i for i, op in enumerate(queue) if op[0] == "record" and i not in (attention, event[1]))
    assert release > attention
    queue[-1], queue[release] = queue[release], queue[-1]
    device.wait("other", ("main", attention))
    lane.streams.main_name = "other"
    for layer in ALL:
        lane.layer(layer, 1)
    return device


def test_the_reader_of_another_stream_is_awaited():
    assert moved().explore()[0] is None


# ------------------------------------------------------------------------------------------------ broken machines are seen


class NoWrittenWait(CKVPrefetchState):
    """A layer reads its buffer without waiting for the gather."""

    def complete(self, lease):
        self._buffers[lease.buffer].written = None


class NoMainWait(CKVPrefetchState):
    """The side stream starts at once: it may read the chunk before the layer writes it, and write where another still reads."""

    def consume(self, layer):
        wait, self._streams.wait = self._streams.wait, lambda stream, event: stream == "main" and wait(stream, event)
        try:
            return super().consume(layer)
        finally:
            self._streams.wait = wait


class NoFilled(CKVPrefetchState):
    """A layer waits for its history, but not for its chunk."""

    def filled(self, lease, keep=None):
        pass


class NoDropWait(CKVPrefetchState):
    """A gather in flight is forgotten: what it reads may be freed before it ends."""

    def _drop(self):
        index = self._find(BufferState.READY)
        if index is not None:
            self._buffers[index] = type(self._buffers[index])()


class NoReaderWait(CKVPrefetchState):
    def consume(self, layer):
        for buffer in self._buffers:
            buffer.read = None
        return super().consume(layer)


class LeakingStep(CKVPrefetchState):
    """What a step left in flight is consumed in the next."""

    def begin_step(self, step):
        if self._step is None:
            super().begin_step(step)
        elif step != self._step:
            self._step, self._last = step, None

    def end_step(self):
        pass


class EndlessStep(CKVPrefetchState):
    """A step ends when the next one begins: main has overwritten the block table by then."""

    def end_step(self):
        pass


class SameBuffer(CKVPrefetchState):
    """Looks ahead into the buffer that is being read."""

    def prepare(self, layer):
        ticket = super().prepare(layer)
        return type(ticket)(layer, 1 - ticket.buffer)

    def finish(self, ticket, keep=None):
        super().finish(type(ticket)(ticket.layer, 1 - ticket.buffer), keep)


class NoDrain(CKVPrefetchState):
    def reset(self):
        synchronize, self._streams.synchronize = self._streams.synchronize, lambda event: None
        super().reset()
        self._streams.synchronize = synchronize


SCENES = {
    "steps": lambda machine: [run([WARM, (first, True), (second, True)], machine)[0] for first in subsets(ALL) for second in subsets(ALL)],
    "rebind": lambda machine: [run([WARM, ((0, 1), True), "rebind", WARM], machine)[0]],
    "moved": lambda machine: [moved(machine)],
}


@pytest.mark.parametrize(
    "machine, scene",
    [(NoMainWait, "steps"), (NoWrittenWait, "steps"), (NoFilled, "steps"), (NoDropWait, "steps"), (LeakingStep, "steps"), (EndlessStep, "steps"), (SameBuffer, "steps"), (NoReaderWait, "moved"), (NoDrain, "rebind")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_broken_machine_is_seen(machine, scene):
    assert any(device.explore()[0] for device in SCENES[scene](machine))
    assert any(device.races() for device in SCENES[scene](machine))


# ------------------------------------------------------------------------------------------------ waits, counted


@pytest.mark.parametrize("lookahead", [True, False])
def test_waits_of_a_step(lookahead):
    """No wait that is not needed: in each layer one of the side for main and one of main for the side."""
    device, lane = run([WARM])
    lane.end()
    del lane.streams.waits[:]
    for layer in ALL:
        lane.layer(layer, 1, lookahead)
    lane.end()
    streams = [stream for stream, _ in lane.streams.waits]
    assert streams.count("side-a") == 3 + 3  # and for the last reader of a buffer
    assert streams.count("main") == 3
    assert lane.streams.synchronized == 0


def test_only_reset_blocks_the_host():
    device, lane = run([WARM, ((0,), True)])
    assert lane.streams.synchronized == 0
    lane.machine.reset()
    assert lane.streams.synchronized == 2  # the gather in flight, and the last reader
    lane.machine.reset()
    assert lane.streams.synchronized == 2


# ------------------------------------------------------------------------------------------------ which layer is next


def step(lane, number, names):
    for i, name in enumerate(names):
        lane.layer(i, number, key=layer_key(name))
        yield lane.prefetched[-1]


TARGET = [f"model.layers.{i}.self_attn.attn" for i in range(3)]


def test_layers_are_registered_on_first_sight():
    """A layer that joins later is looked ahead at from the step after."""
    lane = Lane(Device())
    assert list(step(lane, 0, TARGET[:2])) == [False, False]
    assert list(step(lane, 1, TARGET)) == [False, True, False]
    assert list(step(lane, 2, TARGET)) == [False, True, True]


@pytest.mark.parametrize("draft", ["model.layers.3.self_attn.attn", "draft_model.layers.0.self_attn.attn"])
@pytest.mark.parametrize("same_metadata", [False, True])
def test_the_draft_follows_no_target_layer(draft, same_metadata):
    """In one lane, as with a model runner that has no lane for the draft: the draft has forward passes of its own, on model runner
    V2 with the target's metadata, and so with the number of its step. A step in which it does not run leaves nothing behind."""
    lane = Lane(Device())
    numbers = itertools.count()
    for runs in (2, 2, 0, 2):
        number = next(numbers)
        list(step(lane, number, TARGET))
        assert lane.machine.next_layer() is None
        lane.end()
        assert lane.machine.state_of(0) is lane.machine.state_of(1) is BufferState.FREE
        for _ in range(runs):
            lane.layer(3, number if same_metadata else next(numbers), key=layer_key(draft))
            assert not lane.prefetched[-1] and lane.machine.next_layer() is None
            lane.end()
    assert lane.prefetched[: 3] + lane.prefetched[5:8] == [False] * 4 + [True] * 2
    assert lane.device.races() is None


@pytest.mark.parametrize("ran", [0, 1, 2])
def test_a_step_ends_by_itself(ran):
    """Layers that stop early leave a gather in flight: main waits for it, and nothing of it is in any buffer."""
    device, lane = run([WARM, (range(ran), True)])
    waits = len(lane.streams.waits)
    lane.end()
    assert [stream for stream, _ in lane.streams.waits[waits:]] == (["main"] if ran else [])
    assert [lane.machine.state_of(b) for b in (0, 1)] == [BufferState.FREE] * 2
    assert lane.machine.next_layer() is None
    device.work("main", writes={lane.cell("block table"): "the next step's"})
    assert device.explore()[0] is None
    with pytest.raises(RuntimeError, match="before any step"):
        lane.machine.consume(A)


class Listener:
    def __init__(self):
        self.heard = []

    def end_step(self):
        self.heard.append("end")

    def fail(self, error):
        self.heard.append(error)


def test_a_forward_pass_tells_all_lanes():
    first, second = Listener(), Listener()
    for listener in (first, second):
        ckv_prefetch.register_lane(listener)
    with ckv_prefetch.ckv_step():
        assert first.heard == []
    assert first.heard == second.heard == ["end"]
    error = KeyboardInterrupt("stop")
    with pytest.raises(KeyboardInterrupt), ckv_prefetch.ckv_step():
        raise error
    assert first.heard == second.heard == ["end", error]
    del second  # lanes are not kept alive
    with ckv_prefetch.ckv_step():
        pass
    assert first.heard[-1] == "end" and listener.heard[-1] == "end"


def test_interleaved_groups_do_not_look_ahead():
    """Neighbours that never share a step, as layers of two KV cache groups, whose block tables differ."""
    lane = Lane(Device())
    for number in range(0, 12, 4):
        for layer in range(4):
            lane.layer(layer, number + layer % 2)
    assert not any(lane.prefetched)
    assert lane.device.races() is None


def test_a_skipped_layer():
    """The layer looked ahead at does not run: its gather is dropped, and the next one is synchronous and right."""
    device, lane = run([WARM, ((0, 2), True)])
    assert lane.prefetched[3:] == [False, False]
    assert device.explore()[0] is None


def test_a_layer_that_runs_twice_in_a_step():
    device, lane = run([WARM, ((0, 0, 1, 1), True)])
    assert lane.prefetched[3:] == [False, False, True, False]
    assert device.explore()[0] is None


@pytest.mark.parametrize(
    "name, key",
    [
        ("model.layers.7.self_attn.attn", ("model.layers.*.self_attn.attn", 7)),
        ("model.layers.0.self_attn.mla_attn", ("model.layers.*.self_attn.mla_attn", 0)),
        ("2.self_attn", ("*.self_attn", 2)),
        ("encoder.layers.61", ("encoder.layers.*", 61)),
        ("attn", None),
        ("", None),
        ("model.layers.3.attn.1", None),
        ("model.layers7.attn", None),
    ],
)
def test_layer_key(name, key):
    assert layer_key(name) == (key and LayerKey(*key))


# ------------------------------------------------------------------------------------------------ misuse


def machine():
    return CKVPrefetchState(FakeStreams(Device(), "a"))


def inside(layer):
    """A machine in its first step, and the lease of `layer`."""
    m = machine()
    m.begin_step(1)
    return m, m.consume(layer)


A, B, C = (LayerKey("layers.*", i) for i in range(3))


def test_no_layer_before_a_step():
    with pytest.raises(RuntimeError, match="before any step"):
        machine().consume(A)
    with pytest.raises(RuntimeError, match="outside of any layer"):
        machine().prepare(A)


def test_one_layer_at_a_time():
    m, lease = inside(A)
    with pytest.raises(RuntimeError, match="before release of the last"):
        m.consume(B)
    with pytest.raises(RuntimeError, match="step begins inside a layer"):
        m.begin_step(2)
    with pytest.raises(RuntimeError, match="step ends inside a layer"):
        m.end_step()
    m.begin_step(1)
    m.release(lease)
    for call in (m.release, m.complete, m.filled):
        with pytest.raises(RuntimeError, match="not held"):
            call(lease)


def test_release_completes():
    """A layer that fails before it reads: its buffer is free only behind the gather."""
    m, lease = inside(A)
    m.filled(lease)
    m.release(lease)
    assert [stream for stream, _ in m._streams.waits].count("main") == 1


def test_one_gather_at_a_time():
    m, lease = inside(A)
    ticket = m.prepare(B)
    for call in (lambda: m.prepare(C), lambda: m.begin_step(2)):
        with pytest.raises(RuntimeError, match="two gathers at once|inside a layer"):
            call()
    m.finish(ticket)
    with pytest.raises(RuntimeError, match="overwrite an unread one"):
        m.prepare(C)
    with pytest.raises(RuntimeError, match="is not prepared"):
        m.finish(ticket)
    m.release(lease)
    with pytest.raises(RuntimeError, match="not held"):
        m.complete(ckv_prefetch.Lease(ticket.buffer, lease.buffer, True))
    assert m.consume(B).prefetched


def test_no_layer_between_prepare_and_finish():
    m, lease = inside(A)
    m.prepare(B)
    m.release(lease)
    for call in (lambda: m.consume(B), lambda: m.begin_step(2), m.end_step):
        with pytest.raises(RuntimeError, match="before finish"):
            call()


def test_what_the_gather_reads_is_kept_until_it_was_awaited():
    class Tables:
        pass

    for end in ("consume", "filled", "another layer", "step", "end", "reset"):
        m = machine()
        m.begin_step(1)
        tables = Tables()
        alive = weakref.ref(tables)
        lease = m.consume(A)
        if end == "filled":
            m.filled(lease, keep=tables)
        else:
            m.finish(m.prepare(B), keep=tables)
        del tables
        assert alive() is not None
        m.release(lease)
        assert (alive() is None) == (end == "filled")
        if end == "consume":
            lease = m.consume(B)
            assert alive() is not None
            m.complete(lease)
        elif end == "another layer":
            m.consume(C)
        elif end == "step":
            m.begin_step(2)
        elif end == "end":
            m.end_step()
        else:
            m.reset()
        assert alive() is None, end


def test_reset_in_the_middle_then_as_new():
    """After an error in a layer or a gather, reset drains whatever was under way."""
    for until in ("hold", "fill"):
        m, _ = inside(A)
        if until == "fill":
            m.prepare(B)
        m.reset()
        assert m._streams.synchronized == 2
        m.begin_step(1)
        assert not m.consume(A).prefetched


def test_close_drains_and_refuses():
    m, lease = inside(A)
    m.finish(m.prepare(B))
    m.release(lease)
    m.close()
    m.close()
    assert m._streams.synchronized == 2
    for call in (lambda: m.begin_step(2), lambda: m.consume(A), lambda: m.prepare(A), lambda: m.finish(None), lambda: m.release(None), m.end_step):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_needs_no_torch():
    code = f"import runpy, sys; runpy.run_path({str(SOURCE)!r}); assert not {{'torch', 'vllm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
