"""What becomes of requests in a pool of engines, without Ray and with a clock set by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from batchsql.backends.ray_board import Board, Verdict

LOST_SECONDS = 30
MAX_CRASHES = 4


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    return Board(LOST_SECONDS, MAX_CRASHES, clock)


def live(board: Board, *workers: str, slots: int = 4) -> None:
    for worker in workers:
        board.beat(worker, slots, {})


def test_block_keeps_its_number_and_is_empty_once_settled(board: Board) -> None:
    assert board.payload(0) is None
    board.put([1, 2], b"first")
    board.put([3], b"second")
    assert [board.payload(0), board.payload(1), board.payload(2)] == [b"first", b"second", None]
    board.settle([1], is_answered=True)
    assert board.payload(0) == b"first"
    board.settle([2], is_answered=True)
    assert [board.payload(0), board.payload(1)] == [b"", b"second"]


def test_settled_requests_are_not_asked(board: Board) -> None:
    board.put([1, 2, 3], b"block")
    board.settle([2], is_answered=True)
    assert board.begin(0, "a") == {1: Verdict.ASK, 3: Verdict.ASK}
    board.settle([1, 3], is_answered=True)
    assert board.begin(0, "a") == {}
    assert board.status().begun == 2


def test_settling_what_is_unknown_changes_nothing(board: Board) -> None:
    board.put([1], b"block")
    board.settle([7], is_answered=True)
    assert board.payload(0) == b"block"


def test_worker_hears_which_blocks_it_need_not_finish(board: Board) -> None:
    board.put([1], b"one")
    board.put([2], b"two")
    board.begin(0, "a")
    board.begin(1, "a")
    assert board.beat("a", 4, {}) == []
    board.settle([1], is_answered=False)
    assert board.beat("a", 4, {}) == [0]
    assert board.beat("a", 4, {}) == []


def test_silent_workers_blocks_go_to_the_next_under_new_numbers(board: Board, clock: Clock) -> None:
    board.put([1, 2], b"block")
    live(board, "a", "b")
    board.begin(0, "a")
    board.settle([1], is_answered=True)
    clock.now = LOST_SECONDS + 1
    live(board, "b")
    assert board.payload(0) == b""
    assert board.payload(1) == b"block"
    assert board.begin(0, "a again") == {}  # should its successor come after all
    assert board.begin(1, "b") == {2: Verdict.ASK}


def test_block_that_nobody_begins_goes_to_the_end(board: Board, clock: Clock) -> None:
    board.put([1], b"fetched")
    board.put([2], b"begun")
    board.put([3], b"waits for its reader")
    for index in (0, 1):
        board.payload(index)
    board.begin(1, "a")
    clock.now = LOST_SECONDS + 1
    live(board, "a")
    clock.now += 1
    live(board, "a")
    assert [board.payload(n) for n in range(5)] == [
        b"", b"begun", b"waits for its reader", b"fetched", None,
    ]  # fmt: skip
    assert board.begin(0, "late") == {}


def test_worker_that_was_only_slow_stops_what_was_moved(board: Board, clock: Clock) -> None:
    board.put([1], b"block")
    board.begin(0, "a")
    clock.now = LOST_SECONDS + 1
    live(board, "b")
    board.begin(1, "b")
    assert board.beat("a", 4, {}) == []  # known anew, and its block is not its own any more
    board.settle([1], is_answered=True)
    assert board.beat("b", 4, {}) == [1]


def test_slots_are_those_of_loaded_workers_that_live(board: Board, clock: Clock) -> None:
    live(board, "a", slots=4)
    live(board, "b", slots=0)
    assert board.status().slots == (4,)
    clock.now = LOST_SECONDS - 1
    live(board, "b", slots=8)
    clock.now = LOST_SECONDS + 1
    assert board.status().slots == (8,)


def test_successor_takes_up_its_blocks_and_its_predecessors_slots_end(board: Board) -> None:
    live(board, "a", "b")
    board.put([1], b"block")
    board.begin(0, "a")
    assert board.begin(0, "a2") == {1: Verdict.ASK}
    live(board, "a2")
    assert board.status().slots == (4, 4)


def test_suspect_is_asked_alone_and_then_given_up(board: Board) -> None:
    board.put([1, 2], b"block")
    assert set(board.begin(0, "a").values()) == {Verdict.ASK}
    assert set(board.begin(0, "b").values()) == {Verdict.ASK}
    assert set(board.begin(0, "c").values()) == {Verdict.ASK_ALONE}
    board.begin_alone("c", 1)
    assert board.begin(0, "d") == {1: Verdict.GIVE_UP, 2: Verdict.ASK_ALONE}


def test_suspect_that_was_not_being_asked_is_not_blamed(board: Board) -> None:
    board.put([1, 2], b"block")
    for worker in ("a", "b", "c"):
        board.begin(0, worker)
    board.begin_alone("c", 1)
    board.begin_alone("c", None)
    assert board.begin(0, "d") == {1: Verdict.ASK_ALONE, 2: Verdict.ASK_ALONE}


@pytest.mark.parametrize("is_answered", [True, False])
def test_deaths_without_an_answer_in_between_are_a_failure(board: Board, is_answered: bool) -> None:
    board.put([0], b"block")
    board.put([1], b"other")
    for number in range(MAX_CRASHES + 1):
        board.begin(0, f"worker {number}")
    assert board.status().failure is None
    board.settle([1], is_answered=is_answered)
    board.begin(0, "one more")
    failure = board.status().failure
    assert (failure is None) == is_answered
    if failure:
        assert "died 5 times" in failure


def test_workers_that_die_while_they_load_are_a_failure(board: Board, clock: Clock) -> None:
    for number in range(MAX_CRASHES + 1):
        live(board, f"worker {number}", slots=0)
        clock.now += LOST_SECONDS + 1
    assert board.status().failure is not None


def test_first_reason_of_a_failure_is_kept(board: Board) -> None:
    board.fail("no memory")
    board.fail("closed")
    assert board.status().failure == "no memory"
