# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dcp-stack project
"""Who may use which CKV buffer when: the state machine of the CKV prefetch.

While layer L computes on the main stream, the *history* of layer L + 1 (rows written
in earlier steps, never rows being written) is gathered on a side stream into the
buffer that L does not read. When L + 1 runs, only the current chunk is missing: the
side stream appends it while the main stream prepares the queries.

One `CKVPrefetchState` orders one lane: two buffers and one side stream.
Lanes share nothing. A lane is what vLLM's workspace manager keeps apart, so each ubatch
and, where the model runner gives the draft model a workspace lane, target and draft
have their own. Where they share one, their layers still do not follow each other in any
step (below).

States of a buffer:

    FREE     nobody uses it. Its last reader may still run on the main stream: `read`.
    FILLING  between `prepare` and `finish`: its gather is being enqueued.
    READY    its gather is enqueued; `written` tells when it is done. At most one.
    HELD     between `consume` and `release`: a layer reads it on the main stream.

    prepare   FREE -> FILLING      side waits for main as of now, and for `read`
    finish    FILLING -> READY     `written` is recorded on the side stream
    consume   READY -> HELD        if it is this layer's: side waits for main as of now,
                                   and the caller appends the chunk there
              FREE -> HELD         otherwise: the caller gathers on the main stream
    appended  HELD                 `written` is recorded anew, behind the chunk
    complete  HELD                 main waits for `written`
    release   HELD -> FREE         `read` is recorded on the main stream
    drop      READY -> FREE        main waits for `written`: wrong layer or new step
    reset     any -> FREE          the host waits for both streams

From `consume` to the next `prepare` no gather is in flight. The chunk then travels
through the other buffer, on the side stream, before the next layer's history does.

A layer is looked ahead at only after it was seen to follow: in some step, it was
consumed right after the layer with the same name and the index before it. So the first
step only discovers; the last layer has no successor, be their number odd or even; and a
draft layer, which runs with a step of its own, follows no target layer.

Every decision depends on calls that all ranks make alike. Nothing here asks a stream
or an event how far it is: that would differ between ranks.

No CUDA and no torch here: streams and events are injected (`Streams`).
"""

import enum
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

    prefetched: it has the layer's history, and the chunk is to be appended on the side
        stream. Otherwise its content is undefined: gather on the main stream.
    scratch: the other buffer, free for the chunk until the next `prepare`.
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

    def _await_reader(self, stream: Any, buffer: _Buffer) -> None:
        if buffer.read is not None:
            self._streams.wait(stream, buffer.read)
            # Whoever uses the buffer next waits for this stream.
            buffer.read = None

    def begin_step(self, step: int) -> None:
        """Start `step`. Nothing of an earlier step is consumed after this.

        Repeating the current step does nothing, so every layer may call it.

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

    def consume(self, layer: LayerKey | None) -> Lease:
        """Take the buffer that `layer` is to read.

        The layer has written its chunk to the cache by now, on the main stream.

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

        index = self._find(BufferState.READY)
        if index is not None and self._buffers[index].layer == layer:
            stream = self._streams.side()
            self._streams.wait(stream, self._streams.record(self._streams.main()))
            self._buffers[index].state = BufferState.HELD
            lease = Lease(index, 1 - index, prefetched=True)
        else:
            self._drop()
            stream = self._streams.main()
            self._buffers[0].state, self._buffers[0].layer = BufferState.HELD, layer
            lease = Lease(0, 1, prefetched=False)
        for buffer in self._buffers:
            # Needed where the model moved to another stream since; else it is free.
            self._await_reader(stream, buffer)
        return lease

    def _held(self, lease: Lease, what: str) -> _Buffer:
        self._require()
        buffer = self._buffers[lease.buffer]
        if buffer.state is not BufferState.HELD:
            raise RuntimeError(f"CKV prefetch: {what} of a buffer that is not held.")
        return buffer

    def appended(self, lease: Lease) -> None:
        """The chunk of a prefetched lease is enqueued on the side stream.

        Raises:
            RuntimeError: closed, or `lease` is not held or not prefetched.

        """
        buffer = self._held(lease, "append")
        if buffer.written is None:
            raise RuntimeError("CKV prefetch: append to a buffer without history.")
        buffer.written = self._streams.record(self._streams.side())

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
        """Allow the side stream to fill a buffer with the history of `layer`.

        Work that is now enqueued on the side stream runs after everything that is on
        the main stream: the writes of earlier steps and the last reader of the buffer.

        Raises:
            RuntimeError: closed, no step begun, a gather is in flight or enqueued.

        """
        self._require(
            two_gathers_at_once=BufferState.FILLING,
            a_gather_would_overwrite_an_unread_one=BufferState.READY,
        )
        if self._step is None:
            raise RuntimeError("CKV prefetch: a gather before any step.")
        index = self._find(BufferState.FREE)
        assert index is not None
        side = self._streams.side()
        self._streams.wait(side, self._streams.record(self._streams.main()))
        self._await_reader(side, self._buffers[index])
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
        filling = self._find(BufferState.FILLING) is not None
        if filling or any(b.written is not None for b in buffers):
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


def reset_ckv_prefetch(layer: Any) -> None:
    """Reset the prefetch of an attention layer, if it has one.

    For whoever binds or frees its KV cache: layers are looked ahead at through the
    cache they have then, but a gather in flight must not outlive the memory it reads.
    """
    workspace = getattr(getattr(layer, "impl", None), "ckv_workspace", None)
    if workspace is not None and workspace.prefetch is not None:
        workspace.prefetch.reset()
