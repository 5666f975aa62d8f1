# SPDX-License-Identifier: Apache-2.0
"""Prompts for the model of margin_deepseek.py, the answers that are right, and the look at what an engine answered.

A prompt holds rows in its whole length and, from about a fifth on, questions whose rows lie in front of them; about as many of
the ones as of the others, so that each layer's copy of nearly every row is on one chain. Rows of a line lie scattered. The last
token is a question, mostly of a thread, and its answer asks again: what is generated is as certain as the prompt's answers.
"""
import collections
import dataclasses
import functools
import random
from collections.abc import Iterable, Mapping

import torch

from .margin_deepseek import BOS, NULL, Spec, Vocabulary, vocabulary

LEAD = 1.0  # an answer must lead by more, in nats


@dataclasses.dataclass(frozen=True)
class Ask:
    """A position that asks, the token which is right after it, and the position that each layer reads for it."""

    position: int
    answer: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """`asks` before the last token; `generated`: the last token's and those of the tokens to be generated, in order."""

    spec: Spec
    tokens: list[int]
    asks: list[Ask]
    generated: list[Ask]
    shared: int  # tokens of the prefix that it was made from

    def chains(self) -> set[tuple[int, int]]:
        """(layer, position) of each row that some answer needs."""
        return {(layer, row) for ask in self.asks + self.generated for layer, row in enumerate(ask.rows)}


@functools.cache
def _tables(spec: Spec) -> tuple[list[int], list[int], list[int]]:
    words = vocabulary(spec)
    return words.row.tolist(), words.asks.tolist(), words.answer.tolist()


class _Reader:
    """What the model can know after some tokens."""

    def __init__(self, spec: Spec, tokens: Iterable[int] = ()):
        self.spec = spec
        self.length = 0
        self.at: dict[int, int] = {}  # symbol: position of its row, the last one
        self.asks: list[Ask] = []
        for token in tokens:
            self.add(token)

    def chain(self, symbol: int) -> tuple[int, ...] | None:
        """Positions of the rows that asking `symbol` reads; None where one is not there."""
        rows = tuple(self.at.get(Vocabulary.after(self.spec, symbol, hop), -1) for hop in range(self.spec.hops))
        return None if -1 in rows else rows

    def add(self, token: int) -> Ask | None:
        """Read one token; what it asks, if that can be answered."""
        row, asks, answer = _tables(self.spec)
        position, self.length = self.length, self.length + 1
        if row[token] >= 0:
            self.at[row[token]] = position
        rows = self.chain(asks[token]) if asks[token] >= 0 else None
        if rows is None:
            return None
        self.asks.append(Ask(position, answer[Vocabulary.after(self.spec, asks[token], self.spec.hops)], rows))
        return self.asks[-1]


def solve(spec: Spec, tokens: list[int], new_tokens: int = 0, shared: int = 0) -> Prompt:
    """The prompt of these tokens, with what is to be generated as far as it is certain, at most `new_tokens`."""
    reader = _Reader(spec, tokens[:-1])
    asks, generated = list(reader.asks), []
    token = tokens[-1]
    while len(generated) < new_tokens and (ask := reader.add(token)) is not None:
        generated.append(ask)
        token = ask.answer
    return Prompt(spec, list(tokens), asks, generated, shared)


# ------------------------------------------------------------------------------------------------ making them


class _Thread:
    """A thread in a prompt: E tokens of a line, `hops` apart from `first` on; `steps` of them can be answered."""

    def __init__(self, spec: Spec, line: int, first: int, steps: int):
        self.spec, self.line, self.first, self.steps = spec, line, first, steps

    def symbol(self, step: int) -> int:
        return self.line * self.spec.line + (self.first + step * self.spec.hops) % self.spec.line

    def pairs(self) -> list[int]:
        """Symbols of the rows that its answers need beside those of its own tokens. The first E of a thread only holds a row."""
        places = range(self.spec.hops, (self.steps + 1) * self.spec.hops)
        return [Vocabulary.after(self.spec, self.symbol(0), p) for p in places if (p - self.line) % self.spec.hops]


class _Maker:
    def __init__(self, spec: Spec, seed: str, prefix: list[int]):
        self.spec, self.words = spec, vocabulary(spec)
        self.rng = random.Random(seed)
        self.tokens = list(prefix)
        self.reader = _Reader(spec, prefix)
        row, asks, _ = _tables(spec)
        self.used = {row[t] // spec.line for t in prefix if row[t] >= 0}
        self.last = {asks[t] // spec.line: asks[t] for t in prefix if asks[t] >= 0 and row[t] >= 0}  # of each thread: the last E's symbol
        self.new: list[int] = []  # symbols that can be asked, not asked yet
        self.old = [s for s in self.reader.at if self.reader.chain(s) is not None and not self._leads(s)]
        self.rng.shuffle(self.old)
        self.own: set[int] = set()  # E tokens that this prompt itself asks

    def _leads(self, symbol: int) -> bool:
        return self.words.thread[symbol] >= 0

    def put(self, token: int) -> None:
        self.tokens.append(token)
        self.reader.add(token)
        row = _tables(self.spec)[0][token]
        if row < 0:
            return
        for hop in range(self.spec.hops):
            symbol = Vocabulary.after(self.spec, row, -hop)
            if self.reader.chain(symbol) is not None and (symbol in self.own or not self._leads(symbol)):
                self.new.append(symbol)

    def ask(self) -> bool:
        """Put a question, of this part or of the prefix; False where there is none."""
        pool = self.old if self.old and (not self.new or self.rng.random() < 0.5) else self.new
        if not pool:
            return False
        index = self.rng.randrange(len(pool))
        pool[index], pool[-1] = pool[-1], pool[index]
        symbol = pool.pop()
        if symbol in self.own:
            self.last[symbol // self.spec.line] = symbol
        self.put(int((self.words.thread if symbol in self.own else self.words.ask)[symbol]))
        return True

    def again(self) -> int:
        """A question that can be answered, whether it was asked or not."""
        asks = [s for s in self.reader.at if self.reader.chain(s) is not None]
        if not asks:
            raise ValueError(f"nothing to ask after {len(self.tokens)} tokens")
        return int(self.words.ask[self.rng.choice(asks)])

    def threads(self, count: int, inside: int, new_tokens: int) -> list[_Thread]:
        """New threads, `inside` answers of each in the prompt."""
        lines = [line for line in range(self.spec.threads) if line not in self.used]
        steps = min(inside + new_tokens, self.spec.line // self.spec.hops)
        made = []
        for line in self.rng.sample(lines, min(count, len(lines))):
            thread = _Thread(self.spec, line, self.spec.hops * self.rng.randrange(self.spec.line // self.spec.hops), steps)
            self.own |= {thread.symbol(step) for step in range(1, inside + 1)}
            made.append(thread)
        return made

    def lines(self, rows: int) -> list[list[int]]:
        """Symbols of unused lines, `rows` in all, each line's shuffled: loud ones up to a quarter, then others."""
        spec = self.spec
        fresh = [line for line in range(spec.threads, spec.lines) if line not in self.used]
        self.rng.shuffle(fresh)
        loud = [line for line in fresh if line >= spec.lines - spec.loud]
        loud = loud[: max(0, rows // 4 // spec.line)]
        rest = [line for line in fresh if line < spec.lines - spec.loud]
        order = loud + rest
        count, over = divmod(rows, spec.line)
        if count + (over > 0) > len(order):
            raise ValueError(f"{rows} more rows, but {len(order)} unused lines of {spec.line}: a larger Spec.lines, or a shorter prompt")
        cut = [list(range(line * spec.line, line * spec.line + size)) for line, size in zip(order, [spec.line] * count + [over]) if size]
        self.rng.shuffle(cut)
        for symbols in cut:
            self.rng.shuffle(symbols)
        return cut

    def order(self, lines: list[list[int]], threads: list[_Thread]) -> list[int]:
        """Tokens that hold rows: some lines at a time, those of the threads anywhere."""
        out, opened = [], []
        waiting = list(lines)
        while opened or waiting:
            while waiting and len(opened) < 12:
                opened.append(waiting.pop())
            symbols = self.rng.choice(opened)
            out.append(int(self.words.pair[symbols.pop()]))
            opened = [s for s in opened if s]
        for thread in threads:
            for token in (*self.words.pair[thread.pairs()].tolist(), int(self.words.thread[thread.symbol(0)])):
                out.insert(self.rng.randrange(len(out) + 1), token)
            self.last[thread.line] = thread.symbol(0)
        return out

    def last_token(self, new_tokens: int) -> int:
        """A question to go on from: a thread's next, if one can be answered, one of those that lead furthest."""
        best, furthest = [], 0
        for symbol in self.last.values():
            token = int(self.words.thread[Vocabulary.after(self.spec, symbol, self.spec.hops)])
            reach = len(solve(self.spec, [*self.tokens, token], new_tokens).generated)
            if reach >= max(furthest, 1):
                best = [token] if reach > furthest else [*best, token]
                furthest = reach
        if best:
            return self.rng.choice(best)
        return self.again()


def make_prompt(spec: Spec, length: int, seed: int = 0, prefix: list[int] | None = None, new_tokens: int = 12) -> Prompt:
    """A prompt of `length` tokens, which begins with the tokens `prefix` of another one where given.

    Prompts of one prefix and different seeds are twins: other rows and questions behind the same ones, half of the questions about
    rows of the prefix. `generated` is as long as `new_tokens` where there is room: from 64 tokens on for 12. ValueError for a
    length without a question, or with more rows than the vocabulary has.
    """
    if length < spec.hops + 2 or (prefix and length <= len(prefix)):
        raise ValueError(f"length={length}: at least {max(spec.hops + 2, len(prefix or []) + 1)} here")
    shared = len(prefix or [])
    maker = _Maker(spec, f"{spec} {length} {seed} {shared}", prefix or [BOS])
    free = length - len(maker.tokens) - 1  # without the last token
    per_step = spec.hops - 1
    # Threads: three answers of each in the prompt where there is room.
    count = min(4, free // 500) or (free >= 3 * per_step + 1)
    if shared and any(line in maker.used for line in maker.last):
        count = min(count, 1)
    inside = 3 if free >= 150 else 0
    wanted = min(new_tokens, (free * 2 // 3 - 1) // per_step) if not inside else new_tokens
    threads = maker.threads(count, inside, wanted) if wanted > 0 else []
    fixed = sum(len(thread.pairs()) + 1 for thread in threads)
    rest = free - fixed
    asks = max(0, min((rest + fixed) // 2, rest)) if shared else max(0, min((rest + fixed) // 2, rest, rest + fixed - spec.hops))
    rows = maker.order(maker.lines(rest - asks), threads)
    rows.reverse()
    while len(maker.tokens) < length - 1:
        left = length - 1 - len(maker.tokens)
        # A little more rows than questions at first, so that questions find something.
        if rows and maker.rng.random() * left < 1.3 * len(rows) or not maker.ask():
            maker.put(rows.pop() if rows else maker.again())
    return solve(spec, [*maker.tokens, maker.last_token(new_tokens)], new_tokens, shared)


# ------------------------------------------------------------------------------------------------ answers


def best_two(logits: torch.Tensor) -> dict[int, tuple[int, float]]:
    """(best token, its lead over the second) of each position of logits [positions, vocabulary]."""
    best = logits.float().topk(2, -1)
    return {i: (int(token), float(lead)) for i, (token, lead) in enumerate(zip(best.indices[:, 0], best.values[:, 0] - best.values[:, 1]))}


@dataclasses.dataclass(frozen=True)
class Wrong:
    ask: Ask
    token: int | None  # None: no answer
    lead: float  # of the right token over the best other one; below 0 where that is better


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`smallest`: the smallest lead, in nats; infinite where nothing was asked."""

    asked: int
    smallest: float
    wrong: list[Wrong]

    def explain(self, world: int = 1, interleave: int = 1) -> str:
        """Which answers were wrong, and on which rank of `world` the rows of their chains lie."""
        per_rank = collections.Counter((layer, row // interleave % world) for w in self.wrong for layer, row in enumerate(w.ask.rows))
        lines = [f"{len(self.wrong)} of {self.asked} answers wrong, smallest lead {self.smallest:.2f}",
                 "rows on their chains by (layer, rank): " + ", ".join(f"{key}: {n}" for key, n in sorted(per_rank.items()))]  # fmt: skip
        for w in self.wrong[:10]:
            where = ", ".join(f"layer {layer} row {row} of rank {row // interleave % world}" for layer, row in enumerate(w.ask.rows))
            answered = f"answered {w.token} by {-w.lead:.2f}"
            if w.token is None:
                answered = "no answer"
            elif w.token == NULL:
                answered = f"found nothing (NULL, by {-w.lead:.2f})"
            elif w.token == w.ask.answer:
                answered = f"right, but by {w.lead:.2f} only"
            lines.append(f"position {w.ask.position}: {answered}; right is {w.ask.answer}; {where}")
        if len(self.wrong) > 10:
            lines.append("...")
        return "\n".join(lines)


def check_answers(prompt: Prompt, found: Mapping[int, tuple[int, float]], start: int = 0, least: float = LEAD) -> Verdict:
    """Judge `found`, (best token, its lead over the second) by position, from position `start` on.

    Right is the right token with a lead above `least`. Of generated tokens only the first wrong one counts: what follows it has
    another history.
    """
    asked, smallest, wrong = 0, float("inf"), []
    last = len(prompt.tokens) - 1
    for ask in (*prompt.asks, *prompt.generated):
        if ask.position < start:
            continue
        asked += 1
        token, lead = found.get(ask.position, (None, 0.0))
        lead = lead if token == ask.answer else -lead
        if not lead > smallest:  # NaN too
            smallest = lead
        if not lead > least:
            wrong.append(Wrong(ask, token, lead))
            if ask.position >= last:
                break
    return Verdict(asked, smallest, wrong)


def judge(rounds: list[list[Prompt]], found, world: int = 1, interleave: int = 1) -> tuple[int, float]:
    """(answers, smallest lead) of rounds of prompts that were answered together.

    `found`: for each prompt how many of its tokens came from a prefix cache, and what `check_answers` wants. AssertionError with
    all that is wrong; `world` and `interleave` say which rank holds which row.
    """
    answers, smallest, wrong = 0, float("inf"), []
    for batch, (prompts, outputs) in enumerate(zip(rounds, found, strict=True)):
        for i, (prompt, (cached, table)) in enumerate(zip(prompts, outputs, strict=True)):
            verdict = check_answers(prompt, table, cached)
            answers, smallest = answers + verdict.asked, min(smallest, verdict.smallest)
            if verdict.wrong:
                wrong.append(f"round {batch}, prompt {i} of {len(prompt.tokens)} tokens, {cached} cached: {verdict.explain(world, interleave)}")
    assert not wrong, "\n\n".join(wrong)
    return answers, smallest
