# SPDX-License-Identifier: Apache-2.0
"""A simulated GPU, and a lane of the CKV prefetch on it.

`Device` stands in for the GPU: streams are queues of operations, an operation has a beginning and an end, and between them
the queues advance in any order that the recorded events allow. Memory cells hold what was last written, and TORN while a
write runs. A read that sees anything but what it must see, at its beginning or at its end, is a failure of the machine.

The state machine is loaded by its file: nothing but the standard library may be needed.
"""
import importlib.util
import pathlib
import sys

SOURCE = pathlib.Path(__file__).parents[3] / "vllm_overlay" / "vllm" / "v1" / "attention" / "ops" / "ckv_prefetch.py"
spec = importlib.util.spec_from_file_location("ckv_prefetch_under_test", SOURCE)
ckv_prefetch = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = ckv_prefetch
spec.loader.exec_module(ckv_prefetch)
BufferState, CKVPrefetchState, LayerKey, layer_key = (
    ckv_prefetch.BufferState, ckv_prefetch.CKVPrefetchState, ckv_prefetch.LayerKey, ckv_prefetch.layer_key
)  # fmt: skip

TORN, FREED = "TORN", "FREED"


# ------------------------------------------------------------------------------------------------ the device


class Device:
    """Queues of ("wait", event), ("record",) and ("work", reads, writes); an event is (queue, index of its record)."""

    def __init__(self):
        self.queues = {}
        self.lanes = []
        self.waits = 0

    def queue(self, name):
        return self.queues.setdefault(name, [])

    def work(self, name, reads=(), writes=()):
        """reads: {cell: expected}, writes: {cell: value}."""
        self.queue(name).append(("work", tuple(dict(reads).items()), tuple(dict(writes).items())))

    def record(self, name):
        self.queue(name).append(("record",))
        return name, len(self.queue(name)) - 1

    def wait(self, name, event):
        self.waits += 1
        self.queue(name).append(("wait", event))

    def host_wait(self, event):
        """Whatever the host enqueues from now on starts after `event`."""
        for name in {*self.queues, "host"}:
            self.queue(name).append(("wait", event))

    def explore(self):
        """Run every interleaving. Returns (a description of the first wrong read or None, states visited)."""
        names = sorted(self.queues)
        index = {name: i for i, name in enumerate(names)}
        queues = [self.queues[name] for name in names]
        cells = {c: i for i, c in enumerate(sorted({c for q in queues for op in q if op[0] == "work" for part in op[1:] for c, _ in part}))}
        # Position 2 i + 1 of a queue: operation i has begun and not ended.
        start = (0,) * len(names), (None,) * len(cells)
        seen, stack = {start}, [start]
        while stack:
            places, memory = stack.pop()
            # Waits and records touch no memory: taking them at once loses no order of reads and writes.
            places = list(places)
            moved = True
            while moved:
                moved = False
                for q, ops in enumerate(queues):
                    while places[q] < 2 * len(ops) and (op := ops[places[q] // 2])[0] != "work":
                        if op[0] == "wait" and places[index[op[1][0]]] < 2 * (op[1][1] + 1):
                            break
                        places[q] += 2
                        moved = True
            if all(place == 2 * len(ops) for place, ops in zip(places, queues)):
                continue
            stuck = True
            for q, ops in enumerate(queues):
                place = places[q]
                if place == 2 * len(ops) or ops[place // 2][0] != "work":
                    continue
                stuck = False
                _, reads, writes = ops[place // 2]
                for cell, expected in reads:
                    own = place % 2 == 1 and memory[cells[cell]] == (TORN, names[q])  # read, then written in place
                    if memory[cells[cell]] != expected and not own:
                        return f"{names[q]} reads {memory[cells[cell]]} in {cell} for {expected}", len(seen)
                after = list(memory)
                for cell, value in writes:
                    if place % 2 == 1 and memory[cells[cell]] != (TORN, names[q]):
                        return f"{names[q]} writes {value} to {cell} together with {memory[cells[cell]]}", len(seen)
                    after[cells[cell]] = (TORN, names[q]) if place % 2 == 0 else value
                state = tuple(place + 1 if i == q else other for i, other in enumerate(places)), tuple(after)
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
            if stuck:
                return f"deadlock at {dict(zip(names, places))}", len(seen)
        return None, len(seen)

    def races(self):
        """The same question through vector clocks, which costs one pass: a pair of accesses that no event orders, or None.

        Reads are not compared with what they expect; with all conflicting accesses ordered, one interleaving answers that.
        """
        names = sorted(self.queues)
        index = {name: i for i, name in enumerate(names)}
        clocks = {name: [0] * len(names) for name in names}
        at, recorded, accesses = dict.fromkeys(names, 0), {}, {}
        memory = {}
        while any(at[name] < len(self.queues[name]) for name in names):
            progress = False
            for name in names:
                while at[name] < len(self.queues[name]):
                    op = self.queues[name][at[name]]
                    clock = clocks[name]
                    if op[0] == "wait":
                        if op[1] not in recorded:
                            break
                        clocks[name] = clock = [max(a, b) for a, b in zip(clock, recorded[op[1]])]
                    elif op[0] == "record":
                        recorded[name, at[name]] = list(clock)
                    else:
                        clock[index[name]] += 1
                        for write, part in ((False, op[1]), (True, op[2])):
                            for cell, value in part:
                                for other, stamp, other_write in accesses.get(cell, ()):
                                    if (write or other_write) and stamp > clock[index[other]]:
                                        return f"{name} and {other} use {cell} at once"
                                if not write and memory.get(cell) != value:
                                    return f"{name} reads {memory.get(cell)} in {cell} for {value}"
                                if write:
                                    memory[cell] = value
                                accesses.setdefault(cell, []).append((name, clock[index[name]], write))
                    at[name] += 1
                    progress = True
            if not progress:
                return f"deadlock at {at}"
        return None


class FakeStreams:
    """`Streams` of one lane on a shared device; the main stream's name can change."""

    def __init__(self, device, lane, main="main"):
        self.device, self.lane, self.main_name = device, lane, main
        self.waits = []
        self.synchronized = 0

    def main(self):
        return self.main_name

    def side(self):
        return f"side-{self.lane}"

    def record(self, stream):
        return self.device.record(stream)

    def wait(self, stream, event):
        self.waits.append((stream, event))
        self.device.wait(stream, event)

    def synchronize(self, event):
        self.synchronized += 1
        self.device.host_wait(event)


# ------------------------------------------------------------------------------------------------ one lane


class Plan:
    """Tables of a step on the device. When the host forgets them, main may use their memory for something else. The block table
    lies in one place, which main overwrites in each step."""

    def __init__(self, lane, step):
        self.lane, self.cell = lane, lane.cell("plan", step)
        block_table = {lane.cell("block table"): ("blocks", step)}
        self.reads = {self.cell: "tables"} | block_table
        lane.device.work(lane.streams.main(), writes=self.reads)

    def __del__(self):
        self.lane.device.work(self.lane.streams.main(), writes={self.cell: FREED})


class Lane:
    """Does with the machine what the torch binding does, on model memory.

    Cells: two buffers, for each layer the cache rows that each step writes, and the plan of each step.
    """

    def __init__(self, device, lane="a", machine=CKVPrefetchState):
        self.device, self.lane = device, lane
        device.lanes.append(self)  # plans live until the device is done
        self.plan = self.step = None
        self.streams = FakeStreams(device, lane)
        self.machine = machine(self.streams)
        self.written = {}
        self.generation = 0
        self.prefetched = []

    def cell(self, *name):
        return (self.lane, *name)

    def rows(self, layer, step):
        return self.cell("rows", self.generation, layer, step)

    def history(self, layer, step):
        """The rows that steps before `step` wrote."""
        return {self.rows(layer, s): "written" for s in self.written.get(layer, []) if s < step}

    def begin(self, step):
        if step != self.step:
            self.end()
            self.plan, self.step = Plan(self, step), step

    def end(self):
        """The forward pass ends."""
        if self.step is not None:
            self.machine.end_step()
        self.plan = self.step = None

    def layer(self, layer, step, lookahead=True, key=None):
        key = key or LayerKey("layers.*", layer)
        device, main, side = self.device, self.streams.main(), self.streams.side()
        content = ("ckv", layer, step)
        self.begin(step)
        tables = self.plan.reads
        # The layer writes its chunk to the cache first.
        device.work(main, writes={self.rows(layer, step): "written"})
        self.written.setdefault(layer, []).append(step)
        chunk = {self.rows(layer, step): "written"}

        self.machine.begin_step(step)
        lease = self.machine.consume(key)
        buffer, scratch = self.cell("buffer", lease.buffer), self.cell("buffer", lease.scratch)
        self.prefetched.append(lease.prefetched)
        if lease.prefetched:
            device.work(side, tables | chunk, {scratch: ("share", *content)})
            device.work(side, {scratch: ("share", *content)}, {scratch: ("chunk", *content)})
            device.work(side, tables | {scratch: ("chunk", *content), buffer: ("history", *content)}, {buffer: content})
        else:
            device.work(side, tables | self.history(layer, step) | chunk, {buffer: ("share", *content)})
            device.work(side, {buffer: ("share", *content)}, {buffer: content})
        self.machine.filled(lease, keep=self.plan)
        following = self.machine.next_layer()
        if lookahead and following is not None:
            ticket = self.machine.prepare(following)
            ahead = ("history", "ckv", following.index, step)
            target = self.cell("buffer", ticket.buffer)
            device.work(side, tables | self.history(following.index, step), {target: ("share", *ahead)})
            device.work(side, {target: ("share", *ahead)}, {target: ahead})
            self.machine.finish(ticket, keep=self.plan)
        self.machine.complete(lease)
        device.work(main, {buffer: content})
        self.machine.release(lease)

    def rebind(self):
        """The old caches are freed by the host and new ones bound, as after profiling. The step before may not have ended."""
        self.machine.reset()
        for layer, steps in self.written.items():
            for step in steps:
                self.device.work("host", writes={self.rows(layer, step): FREED})
        self.generation += 1
        self.written = {}
