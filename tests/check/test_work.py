"""Work in threads: results in order, errors where they belong, and never too much under way."""

from __future__ import annotations

import threading

import pytest

from dafmount.check.work import Work


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(jobs: int) -> None:
    with Work(jobs) as work:
        assert list(work.ordered(lambda n: n * n, range(50))) == [n * n for n in range(50)]
        assert list(work.ordered(str, [])) == []


def test_tasks_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)
    with Work(2) as work:
        assert sorted(work.ordered(lambda _: both.wait(), range(2))) == [0, 1]


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_error_is_raised_where_its_result_would_be(jobs: int) -> None:
    def work_on(n: int) -> int:
        if n == 3:
            raise ValueError(n)
        return n

    with Work(jobs) as work:
        results = work.ordered(work_on, range(10))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="3"):
            next(results)


def test_no_more_than_twice_the_jobs_are_under_way() -> None:
    taken = 0

    def tasks() -> object:
        nonlocal taken
        for n in range(100):
            taken += 1
            yield n

    with Work(3) as work:
        for given, _ in enumerate(work.ordered(lambda n: n, tasks()), start=1):  # type: ignore[arg-type]
            assert taken - given <= 6
    assert taken == 100


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    with Work(1, lambda *at: told.append(at)) as work:
        work.expect(10)
        work.advance(4)
        work.advance(6)
    assert told == [(4, 10), (10, 10)]
