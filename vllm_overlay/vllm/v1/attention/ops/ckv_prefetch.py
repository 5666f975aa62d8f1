# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Who may use which CKV buffer when: the state machine of the CKV prefetch.

While layer L computes on the main stream, the *history* of layer L + 1 (rows that no
request of this step writes, see `ckv_prefetch_plan`) is gathered on a side stream into
the buffer that L does not read. When L + 1 runs, only the late rows are missing: the
side stream appends them while the main stream selects tokens and prepares queries. A
layer that was not looked ahead at gathers everything there.

One `CKVPrefetchState` orders one lane: two buffers and one side stream.
Lanes share nothing. A lane is what vLLM's workspace manager keeps apart: each ubatch
and, where the model runner gives the draft model a workspace lane, target and draft
have their own. Where they share one, they still never look ahead at each other (below).

States of a buffer:

    FREE     nobody uses it. Its last reader may still run on the main stream: `read`.
    FILLING  between `prepare` and `finish`: its gather is being enqueued.
    READY    its gather is enqueued; `written` tells when it is done. At most one.
    HELD     between `consume` and `release`: a layer reads it on the main stream.

    consume   READY -> HELD        if it is this layer's: the caller appends late rows
              FREE -> HELD         otherwise: the caller gathers everything.
                                   Either way on the side stream, which waits for main
                                   as of now and for `read` of both buffers
    filled    HELD                 `written` is recorded behind that
    prepare   FREE -> FILLING      of the other buffer, while one is HELD
    finish    FILLING -> READY     `written` is recorded on the side stream
    complete  HELD                 main waits for `written`
    release   HELD -> FREE         `read` is recorded on the main stream
    drop      READY -> FREE        main waits for `written`: wrong layer or end of step
    reset     any -> FREE          the host waits for both streams

Only the side stream writes to buffers, in the order of these calls, and the main stream
reads one only while it is HELD and complete. So `prepare` waits for nothing: `consume`
of the layer before it, in the same step, has put the side stream behind the last reader
of the buffer and behind the cache writes of earlier steps. Until `prepare`, the late
rows travel through the buffer that is not HELD.

A step is one forward pass of one model: `ckv_step`, around each, ends it. No gather
outlives it, since the next step overwrites the block tables that a gather reads.
A layer is looked ahead at only after it was seen to follow: in some step, it was
consumed right after the layer with the same name and the index before it. So the first
step only discovers, and the last layer has no successor, be their number odd or even.
The MTP block of a DeepSeek model is named like one (`model.layers.61`, behind 60) and
runs with the target's metadata, but in a forward pass of its own: it follows nothing.

Every decision depends on calls that all ranks make alike. Nothing here asks a stream
or an event how far it is: that would differ between ranks.

No CUDA and no torch here: streams and events are injected (`Streams`).
"""

import enum
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

NUM_BUFFERS = 2


class Streams(Protocol):
    """The two streams of a lane. Streams and events are opaque to the state machine."""

    def main(self) -> Any:
        """The stream on which the model runs now."""

    def side(self) -> Any:
        """The lane's own stream."""

    def record(self, stream: Any) -> Any:
        """A new event that completes when all work enqueued on `stream` has."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of `stream` wait for `event`. Does not block the host."""

    def synchronize(self, event: Any) -> None:
        """Block the host until `event` completes."""


class LayerKey(NamedTuple):
    """Place of a layer among those of the same name.

    name: the layer name around its index. index: the layer's index.
    """

    name: str
    index: int

    @property
    def successor(self) -> "LayerKey":
        return LayerKey(self.name, self.index + 1)

    @property
    def predecessor(self) -> "LayerKey":
        return LayerKey(self.name, self.index - 1)


def layer_key(layer_name: str) -> LayerKey | None:
    """The key of `model.layers.7.self_attn.attn`: index 7.

    None for a name that has no integer part or several: such a layer has no known
    place, so it is never looked ahead at.
    """
    parts = layer_name.split(".")
    places = [i for i, part in enumerate(parts) if part.isdecimal()]
    if len(places) != 1:
        return None
    (place,) = places
    index = int(parts[place])
    parts[place] = "*"
    return LayerKey(".".join(parts), index)


class BufferState(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    HELD = "held"


@dataclass
class _Buffer:
    state: BufferState = BufferState.FREE
    layer: LayerKey | None = None
    written: Any = None
    read: Any = None
    keep: Any = None
    """What the gather in flight reads: alive until somebody waited for it."""


@dataclass(frozen=True)
class Ticket:
    """Right to fill a buffer on the side stream, from `prepare` to `finish`."""

    layer: LayerKey
    buffer: int


@dataclass(frozen=True)
class Lease:
    """Right to use a buffer, from `consume` to `release`.

    prefetched: it has the layer's history, and late rows are to be appended. Otherwise
        its content is undefined: everything is to be gathered.
    scratch: the other buffer, free for late rows until the next `prepare`.
    """

    buffer: int
    scratch: int
    prefetched: bool


class CKVPrefetchState:
    """The state machine of one lane. Not thread-safe: one host thread runs a lane."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._step: int | None = None
        self._last: LayerKey | None = None
        self._follows: set[LayerKey] = set()
        self._closed = False

    def _find(self, state: BufferState) -> int | None:
        for i, buffer in enumerate(self._buffers):
            if buffer.state is state:
                return i
        return None

    def state_of(self, buffer: int) -> BufferState:
        return self._buffers[buffer].state

    def _require(self, **forbidden: BufferState) -> None:
        if self._closed:
            raise RuntimeError("The CKV prefetch is closed.")
        for what, state in forbidden.items():
            if self._find(state) is not None:
                raise RuntimeError(f"CKV prefetch: {what.replace('_', ' ')}.")

    def _drop(self) -> None:
        """Give up the gather in flight, if any. It still runs: main waits for it."""
        index = self._find(BufferState.READY)
        if index is not None:
            buffer = self._buffers[index]
            self._streams.wait(self._streams.main(), buffer.written)
            self._buffers[index] = _Buffer(read=buffer.read)

    def begin_step(self, step: int) -> None:
        """Start `step`, unless it runs already: every layer may call it.

        Should an earlier step not have ended, nothing of it is consumed after this.

        Args:
            step: identifies the step; steps never repeat.

        Raises:
            RuntimeError: closed, or inside a layer or a `prepare`.

        """
        self._require()
        if step == self._step:
            return
        self._require(
            a_step_begins_inside_a_layer=BufferState.HELD,
            a_step_begins_before_finish=BufferState.FILLING,
        )
        self._drop()
        self._step = step
        self._last = None

    def end_step(self) -> None:
        """End the step, if one runs: main waits for a gather that nobody consumed.

        Raises:
            RuntimeError: closed, or inside a layer or a `prepare`.

        """
        self._require(
            the_step_ends_inside_a_layer=BufferState.HELD,
            the_step_ends_before_finish=BufferState.FILLING,
        )
        self._drop()
        self._step = self._last = None

    def consume(self, layer: LayerKey | None) -> Lease:
        """Take the buffer that `layer` is to read, for the side stream to fill.

        The layer has written the step's rows to the cache by now, on the main stream.

        Args:
            layer: None for a layer without a key.

        Raises:
            RuntimeError: closed, no step begun, or inside a layer or a `prepare`.

        """
        self._require(
            a_layer_begins_before_release_of_the_last=BufferState.HELD,
            a_layer_begins_before_finish=BufferState.FILLING,
        )
        if self._step is None:
            raise RuntimeError("CKV prefetch: a layer begins before any step.")
        if layer is not None and layer.predecessor == self._last:
            self._follows.add(layer)
        self._last = layer

        side = self._streams.side()
        self._streams.wait(side, self._streams.record(self._streams.main()))
        for buffer in self._buffers:
            # Needed where the model moved to another stream since; else it is free.
            if buffer.read is not None:
                self._streams.wait(side, buffer.read)
                buffer.read = None
        index = self._find(BufferState.READY)
        if index is not None and self._buffers[index].layer == layer:
            self._buffers[index].state = BufferState.HELD
            return Lease(index, 1 - index, prefetched=True)
        self._drop()
        self._buffers[0].state, self._buffers[0].layer = BufferState.HELD, layer
        return Lease(0, 1, prefetched=False)

    def _held(self, lease: Lease, what: str) -> _Buffer:
        self._require()
        buffer = self._buffers[lease.buffer]
        if buffer.state is not BufferState.HELD:
            raise RuntimeError(f"CKV prefetch: {what} of a buffer that is not held.")
        return buffer

    def filled(self, lease: Lease, keep: Any = None) -> None:
        """The late rows, or everything, are enqueued on the side stream.

        Args:
            keep: as for `finish`.

        Raises:
            RuntimeError: closed, or `lease` is not held.

        """
        buffer = self._held(lease, "filling")
        buffer.written = self._streams.record(self._streams.side())
        buffer.keep = keep

    def complete(self, lease: Lease) -> None:
        """What the main stream does from now on may read the buffer.

        Raises:
            RuntimeError: closed, or `lease` is not held.

        """
        buffer = self._held(lease, "completion")
        if buffer.written is not None:
            self._streams.wait(self._streams.main(), buffer.written)
            buffer.written = buffer.keep = None

    def next_layer(self) -> LayerKey | None:
        """The layer to look ahead at from the one being consumed, if one is known."""
        if self._last is None or self._last.successor not in self._follows:
            return None
        return self._last.successor

    def prepare(self, layer: LayerKey) -> Ticket:
        """Allow the side stream to fill the other buffer with the history of `layer`.

        Raises:
            RuntimeError: closed, outside a layer, a gather is in flight or enqueued.

        """
        self._require(
            two_gathers_at_once=BufferState.FILLING,
            a_gather_would_overwrite_an_unread_one=BufferState.READY,
        )
        if self._find(BufferState.HELD) is None:
            raise RuntimeError("CKV prefetch: a look ahead outside of any layer.")
        index = self._find(BufferState.FREE)
        assert index is not None, (
            f"CKV prefetch: no buffer is free: {[b.state for b in self._buffers]}."
        )
        self._buffers[index] = _Buffer(BufferState.FILLING, layer)
        return Ticket(layer, index)

    def finish(self, ticket: Ticket, keep: Any = None) -> None:
        """The gather of `ticket` is enqueued on the side stream.

        Args:
            keep: kept alive until the gather was waited for.

        Raises:
            RuntimeError: closed, or `ticket` is not the gather being prepared.

        """
        self._require()
        buffer = self._buffers[ticket.buffer]
        if buffer.state is not BufferState.FILLING or buffer.layer != ticket.layer:
            raise RuntimeError("CKV prefetch: finish of a gather that is not prepared.")
        buffer.written = self._streams.record(self._streams.side())
        buffer.keep = keep
        buffer.state = BufferState.READY

    def release(self, lease: Lease) -> None:
        """The reader of `lease` is enqueued on the main stream.

        Raises:
            RuntimeError: closed, or `lease` is not held.

        """
        self._held(lease, "release")
        # For a layer that failed before its reader: whoever is next follows main.
        self.complete(lease)
        read = self._streams.record(self._streams.main())
        self._buffers[lease.buffer] = _Buffer(read=read)

    def reset(self) -> None:
        """Forget steps and layers, as when caches are bound or freed.

        Blocks the host until both streams have done what uses the buffers: after this
        the memory they read and write may go.
        """
        buffers = self._buffers
        if any(b.state is not BufferState.FREE for b in buffers):
            self._streams.synchronize(self._streams.record(self._streams.side()))
        if any(b.state is BufferState.HELD or b.read is not None for b in buffers):
            self._streams.synchronize(self._streams.record(self._streams.main()))
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._step = self._last = None
        self._follows.clear()

    def close(self) -> None:
        """`reset`, and refuse any further use. May be repeated."""
        self.reset()
        self._closed = True


class Lane(Protocol):
    """What `ckv_step` tells a prefetcher."""

    def end_step(self) -> None:
        """The forward pass has ended."""

    def fail(self, error: BaseException) -> None:
        """The forward pass raised `error`, perhaps in the middle of anything."""


_lanes: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register_lane(lane: Lane) -> None:
    """`ckv_step` tells `lane`, for as long as it lives."""
    _lanes.add(lane)


@contextmanager
def ckv_step() -> Iterator[None]:
    """A forward pass: where it ends, the steps of all lanes do."""
    try:
        yield
    except BaseException as error:
        for lane in list(_lanes):
            lane.fail(error)
        raise
    for lane in list(_lanes):
        lane.end_step()


_captures = 0


@contextmanager
def ckv_capture() -> Iterator[None]:
    """CUDA graphs are captured inside: no batch gathers, of any kind of graph."""
    global _captures
    _captures += 1
    try:
        yield
    finally:
        _captures -= 1


def in_ckv_capture() -> bool:
    """Whether this is inside of `ckv_capture`."""
    return _captures > 0


def reset_ckv_prefetch(layer: Any) -> None:
    """Reset the prefetch of an attention layer, if it has one.

    For whoever binds or frees its KV cache: layers are looked ahead at through the
    cache they have then, but a gather in flight must not outlive the memory it reads.
    """
    workspace = getattr(getattr(layer, "impl", None), "ckv_workspace", None)
    if workspace is not None and workspace.prefetch is not None:
        workspace.prefetch.reset()
