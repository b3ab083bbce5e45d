"""Evidence of a failure in the error output of a rank: tracebacks, C++ exceptions, and fatal signals.

The output of a failed rank ends with stacks of all threads, frames of C++ code, and errors of parent processes. They
hide the cause. The evidence is the first exception of the last group of errors, and the message of the library.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from contracts.fields import strip_control_characters

MAX_ERROR_LINES: Final = 1500  # of error output to search
MAX_ERROR_LINE_CHARS: Final = 1000
MAX_EVIDENCE_LINES: Final = 40
HEAD_LINES: Final = 12  # of longer evidence
MAX_STACK_FRAMES: Final = 20  # of one thread at a fatal signal
MAX_MESSAGE_LINES: Final = 8
MAX_GAP_LINES: Final = 2  # between the errors of one group
MAX_NATIVE_GAP_LINES: Final = 20  # between errors of native code, which print stacks
MAX_TRAILING_LINES: Final = 60  # after the last error, if the rank recorded no error
MAX_ERROR_CHARS: Final = 500
COMPARED_CHARS: Final = 80  # of two messages of one error
MAX_SHOWN_FRAMES: Final = 3  # of the stack at a fatal signal
LIBRARY_PARTS: Final = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "/workers/meter/")

_RANK_PREFIX = re.compile(r"^\[(?:rank|default)?\d+\]: ?")  # of torch and torchrun
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):")
_CHAIN = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of '(?P<name>[^']+)'|(?P<how>\w.*))")
_WHAT = re.compile(r"\s+what\(\):\s*(?P<text>.*)")
_FATAL = re.compile(r"Fatal Python error: (?P<text>.+)")
_NATIVE = re.compile(  # of glibc, of assert(), and of torch's watchdog for NCCL
    r"(?:double free or corruption|corrupted |free\(\): |malloc\(\): |realloc\(\): |munmap_chunk\(\)|malloc_consolidate"
    r"|\*\*\* stack smashing|.*: Assertion `.*' failed\.$"
    r"|.*(?:Watchdog caught collective operation timeout|Process group watchdog thread terminated with exception))"
)
_THREAD = re.compile(r"(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_STACK_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_DUMP_END = re.compile(r"Extension modules: |  <no Python frame>|  \.\.\.$")
_CPP_FRAME = re.compile(r"\s*(?:frame #\d+: |#\d+ 0x)")
_CPP_STACK = re.compile(r"Exception raised from .*\(most recent call first\)")
_CPP_PLACE = re.compile(r"\[(?:enforce fail at )?\S+\.(?:cc|cpp|h|hpp|cu):\d+\] *")
_LOG_PLACE = re.compile(r"\[?\[?[EFW]\d{4} [\d:.]+ .*?\.(?:cc|cpp|h|cu):\d+\] ?")
# An error that only reports the failure of another process or thread.
_WRAPPER = re.compile(
    r"(?:[\w.]*\.)?(?:ProcessRaisedException|ProcessExitedException|ChildFailedError|CalledProcessError"
    r"|SpawnException|BrokenProcessPool|RemoteTraceback)\b"
)


class ErrorBlock(NamedTuple):
    """One error, with the indexes of its first line and of the line after its last line."""

    message: str
    start: int
    end: int
    is_chained: bool = False  # to the block before it, as in "During handling of the above exception"
    is_fatal: bool = False  # only the name of a signal


class FailureEvidence(NamedTuple):
    """The error that ended a process, and the lines that show it. `first` is the exception that led to this error."""

    message: str = ""
    first: str = ""
    lines: tuple[str, ...] = ()


class ErrorOutput:
    """The last lines of a rank's error output, without stacks of other threads and of C++ code."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_ERROR_LINES)
        self._is_current = False  # the dumped thread received the signal
        self._frames: list[str] = []  # of the dumped thread
        self._current: list[str] = []  # of the thread that received the signal
        self._own: list[str] = []  # of the oldest thread with the user's code, which a dump lists last

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            text = _clean(line)
            if thread := _THREAD.match(text):
                self._is_current, self._frames = thread["current"] != "Thread", []
            elif _STACK_FRAME.match(text):
                self._add_frame(text)
            elif not (_DUMP_END.match(text) or _CPP_FRAME.match(text)):
                if _FATAL.match(text):
                    self._current, self._own = [], []
                self._lines.append(line[:MAX_ERROR_LINE_CHARS])

    def _add_frame(self, text: str) -> None:
        if len(self._frames) < MAX_STACK_FRAMES and (self._is_current or _is_own(text)):
            self._frames.append(text)
            if self._is_current:
                self._current = self._frames
            else:
                self._own = self._frames

    def _get_stack(self) -> list[str]:
        """Return the innermost frames of the user's code at a fatal signal, the most recent call last."""
        frames = [text for text in self._current if _is_own(text)] or self._own or self._current
        return frames[:MAX_SHOWN_FRAMES][::-1]

    def find_evidence(self, recorded: str, *, by_signal: bool) -> FailureEvidence:
        """Return the evidence of a failure.

        Args:
            recorded: The error that the rank recorded, or "".
            by_signal: A signal ended the rank, so only errors of native code count.
        """
        evidence = find_evidence(list(self._lines), recorded, by_signal=by_signal)
        if by_signal and evidence.lines:
            evidence = evidence._replace(lines=(*self._get_stack(), *evidence.lines))
        return evidence


def find_evidence(lines: Sequence[str], recorded: str, *, by_signal: bool) -> FailureEvidence:
    """Return the evidence in lines of error output, see `ErrorOutput.find_evidence`."""
    texts = [_clean(line) for line in lines]
    blocks = list(_iterate_blocks(texts))
    if by_signal:
        blocks = _select_native(blocks, texts)
    elif blocks and not recorded and len(texts) - blocks[-1].end > MAX_TRAILING_LINES:
        return FailureEvidence()
    group = _get_last_group(blocks, MAX_NATIVE_GAP_LINES if by_signal else MAX_GAP_LINES)
    if not group:
        return FailureEvidence(recorded)
    causes = [block for block in group if not (_WRAPPER.match(block.message) or block.is_fatal)] or group
    chain = _get_chain(causes)
    message = chain[-1].message
    if recorded and not _WRAPPER.match(recorded):
        message = recorded
        chain = next((chain for chain in _split_chains(group) if _is_same(chain[-1].message, recorded)), chain[:0])
    if chain and chain[-1].is_fatal and not recorded:
        message = ""  # the signal is known
    first = chain[0].message if chain and not _is_same(chain[0].message, message) else ""
    shown = lines[(chain or group)[0].start : (chain or group)[-1].end]
    if by_signal:
        ends = [block.start + 1 if block.is_fatal else block.end for block in causes]
        shown = [line for block, end in zip(causes, ends, strict=True) for line in lines[block.start : end]]
    return FailureEvidence(message[:MAX_ERROR_CHARS], first[:MAX_ERROR_CHARS], _limit(shown))


def _select_native(blocks: Sequence[ErrorBlock], texts: Sequence[str]) -> list[ErrorBlock]:
    """Return the errors of native code, with exceptions before them that can have led to them."""
    is_native = [not _TRACEBACK.match(texts[block.start]) for block in blocks]
    native = [block for block, is_one in zip(blocks, is_native, strict=True) if is_one]
    if all(block.is_fatal for block in native):
        return native
    return list(blocks[: len(blocks) - is_native[::-1].index(True)])


def _is_own(line: str) -> bool:
    return not any(part in line for part in LIBRARY_PARTS)


def _iterate_blocks(texts: Sequence[str]) -> Iterable[ErrorBlock]:
    at, is_chained = 0, False
    while at < len(texts):
        block = _read_block(texts, at)
        if block is None:
            is_chained = bool(_CHAIN.match(texts[at])) or (is_chained and not texts[at].strip())
            at += 1
            continue
        yield block._replace(is_chained=is_chained)
        at, is_chained = max(block.end, at + 1), False


def _read_block(texts: Sequence[str], at: int) -> ErrorBlock | None:
    text = texts[at]
    if _TRACEBACK.match(text):
        return _read_traceback(texts, at)
    if found := _TERMINATE.match(text):
        return _read_terminate(texts, at, found)
    if found := _FATAL.match(text):
        return ErrorBlock(found["text"].strip(), at, at + 1, is_fatal=True)
    if _NATIVE.match(text):
        return ErrorBlock(_LOG_PLACE.sub("", text, count=1).strip(), at, at + 1)
    return None


def _read_traceback(texts: Sequence[str], start: int) -> ErrorBlock:
    at = start + 1
    while at < len(texts) and (texts[at][:1] in (" ", "\t") or not texts[at]):
        at += 1
    if at == len(texts) or _read_block(texts, at) is not None:
        return ErrorBlock("", start, at)  # cut, or inside another error
    message, end = texts[at].strip(), at + 1
    if "NCCL error" in message or message.endswith(":"):  # the cause is in the lines that follow
        while end < min(len(texts), at + MAX_MESSAGE_LINES) and texts[end].strip() and not _is_new_record(texts[end]):
            message = f"{message} {texts[end].strip()}"
            end += 1
    else:
        while end < min(len(texts), at + MAX_MESSAGE_LINES) and texts[end][:1] in (" ", "\t") and texts[end].strip():
            end += 1
    return ErrorBlock(message, start, end)


def _read_terminate(texts: Sequence[str], at: int, found: re.Match[str]) -> ErrorBlock:
    if found["name"] is None:
        return ErrorBlock(f"terminate called {found['how']}", at, at + 1)
    end, parts = at + 1, list[str]()
    while end < min(len(texts), at + 1 + MAX_MESSAGE_LINES):
        text = texts[end]
        if what := _WHAT.match(text):
            parts.append(what["text"])
        elif not parts or not text.strip() or _CPP_STACK.match(text) or _is_new_record(text):
            break
        else:
            parts.append(text.strip())
        end += 1
    message = _CPP_PLACE.sub("", " ".join(parts)).strip()
    return ErrorBlock(f"{found['name']}: {message}" if message else found["name"], at, end)


def _is_new_record(text: str) -> bool:
    return any(pattern.match(text) for pattern in (_TRACEBACK, _TERMINATE, _FATAL, _NATIVE, _CHAIN, _THREAD))


def _get_last_group(blocks: Sequence[ErrorBlock], max_gap_lines: int) -> list[ErrorBlock]:
    """Return the last errors that follow one another."""
    group = list(blocks[-1:])
    for block in reversed(blocks[:-1]):
        if group[0].start - block.end > max_gap_lines and not group[0].is_chained:
            break
        group.insert(0, block)
    return [block for block in group if block.message]


def _split_chains(blocks: Sequence[ErrorBlock]) -> list[list[ErrorBlock]]:
    chains: list[list[ErrorBlock]] = []
    for block in blocks:
        if block.is_chained and chains:
            chains[-1].append(block)
        else:
            chains.append([block])
    return chains


def _get_chain(blocks: Sequence[ErrorBlock]) -> list[ErrorBlock]:
    """Return the first exception and the exceptions that followed from it."""
    return _split_chains(blocks)[0]


def _is_same(one: str, other: str) -> bool:
    one, other = " ".join(one.split()), " ".join(other.split())
    size = min(len(one), len(other), COMPARED_CHARS)
    return size > 0 and one[:size] == other[:size]


def _limit(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) <= MAX_EVIDENCE_LINES:
        return tuple(lines)
    left_out = len(lines) - MAX_EVIDENCE_LINES + 1
    tail = lines[HEAD_LINES + left_out :]
    return (*lines[:HEAD_LINES], f"[{left_out} lines are not shown]", *tail)


def _clean(line: str) -> str:
    return _RANK_PREFIX.sub("", strip_control_characters(line))
