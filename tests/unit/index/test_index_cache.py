import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from phasemesh.index import cache as cache_module
from phasemesh.index.cache import CacheFolderInUse, SegmentCache, SegmentRequest
from phasemesh.index.leaf import LeafSource, leaf_search
from phasemesh.index.overlay import visible_rows
from phasemesh.index.spec import Reduction
from tests.unit.index.corpora import random_corpus

CORPUS = random_corpus(1, 12, dim=8, longest=6)
NBYTES = CORPUS.segment().nbytes


def request_for(name, derived=None):
    segment = CORPUS.segment(name=f"{name}.lance")

    def derive():
        if derived is not None:
            derived.append(name)
        return segment

    return SegmentRequest(segment.key, derive)


def must_not_derive(name):
    def derive():
        raise AssertionError(f"{name} was derived again")

    return replace(request_for(name), derive=derive)


@pytest.fixture
def open_cache(tmp_path):
    with ExitStack() as stack:

        def opened(capacity=100 * NBYTES, folder=tmp_path / "cache"):
            cache = SegmentCache(folder, capacity)
            stack.callback(cache.close)
            return cache

        yield opened


def search(cache, *requests, visible=None):
    with cache.lease(requests) as leased:
        assert all(answer.failure is None for answer in leased)
        sources = [LeafSource(n, answer.segment, visible) for n, answer in enumerate(leased)]
        return leaf_search(sources, CORPUS.query, 100, Reduction.SUM).hits


def use(cache, name):
    with cache.lease([request_for(name)]) as [leased]:
        return leased.cold


def test_a_segment_is_derived_once_and_then_resident(open_cache):
    cache = open_cache()
    derived = []
    first = search(cache, request_for("a", derived))
    assert search(cache, request_for("a", derived)) == first
    assert [hit.id for hit in first] == [name for name, _ in CORPUS.ranking()]
    assert derived == ["a"]
    assert (cache.counters.derivations, cache.counters.hits, cache.counters.mapped) == (1, 1, 0)
    assert (cache.size.resident_bytes, cache.size.resident_segments) == (NBYTES, 1)
    assert cache.size.cached_bytes > NBYTES


def test_a_restart_maps_without_deriving(open_cache):
    before = open_cache()
    expected = search(before, request_for("a"), request_for("b"))
    before.close()
    after = open_cache()
    assert search(after, must_not_derive("a"), must_not_derive("b")) == expected
    assert (after.counters.mapped, after.counters.derivations, after.counters.corrupt) == (2, 0, 0)


def test_a_crash_while_writing_leaves_no_trace(open_cache, tmp_path):
    open_cache().close()
    leftover = tmp_path / "cache" / f"{request_for('a').key.file_name}.0123abcd.tmp"
    leftover.write_bytes(b"half a segm")
    cache = open_cache()
    assert not leftover.exists()
    assert len(search(cache, request_for("a"))) > 0


def damage_end(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage", [damage_end, lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"x" * 99]
)
def test_a_damaged_file_is_noticed_removed_and_derived_again(open_cache, tmp_path, damage, caplog):
    before = open_cache()
    expected = search(before, request_for("a"))
    before.close()
    path = tmp_path / "cache" / request_for("a").key.file_name
    path.write_bytes(damage(path.read_bytes()))
    cache = open_cache()
    with caplog.at_level(logging.WARNING):
        assert search(cache, request_for("a")) == expected
    assert (cache.counters.corrupt, cache.counters.derivations) == (1, 1)
    assert "will be derived again" in caplog.text
    cache.close()
    again = open_cache()
    assert search(again, must_not_derive("a")) == expected


def test_a_file_that_was_taken_away_is_derived_again(open_cache, tmp_path):
    cache = open_cache(capacity=0)
    use(cache, "a")
    (tmp_path / "cache" / request_for("a").key.file_name).unlink()
    use(cache, "a")
    assert (cache.counters.derivations, cache.counters.corrupt) == (2, 0)


def test_a_file_is_verified_once_per_process_not_once_per_use(open_cache, monkeypatch):
    cache = open_cache(capacity=0)
    use(cache, "a")
    cache.close()
    cache = open_cache(capacity=0)
    verified = []
    opened = cache_module.open_segment

    def counted(path, key, *, verify):
        verified.append(verify)
        return opened(path, key, verify=verify)

    monkeypatch.setattr(cache_module, "open_segment", counted)
    for _ in range(3):
        use(cache, "a")
    assert verified == [True, False, False]


def test_the_least_recently_used_leaves_first(open_cache):
    cache = open_cache(capacity=2 * NBYTES)
    for name in "aba":
        use(cache, name)
    assert use(cache, "c") is False
    assert [cache.is_resident(request_for(name).key) for name in "abc"] == [True, False, True]
    assert cache.counters.evictions == 1
    assert cache.size.resident_bytes == 2 * NBYTES
    # Evicted, not forgotten: the file is still there.
    search(cache, must_not_derive("b"))


def test_a_segment_in_use_is_never_evicted(open_cache):
    cache = open_cache(capacity=NBYTES)
    with cache.lease([request_for("a")]) as [held]:
        assert use(cache, "b") is True
        assert cache.is_resident(request_for("a").key)
        assert held.segment.tokens[0, 0] == CORPUS.tokens[0, 0]
    assert cache.counters.evictions == 0
    assert use(cache, "b") is False
    assert cache.counters.evictions == 1


def test_what_exceeds_the_budget_is_cold_and_evicts_nobody(open_cache):
    cache = open_cache(capacity=2 * NBYTES)
    names = "abcd"
    with open_cache(folder=cache._folder.parent / "roomy").lease(
        [request_for(name) for name in names]
    ) as roomy:
        expected = [answer.segment.tokens.tobytes() for answer in roomy]
    for turn in range(5):
        # The same two stay resident search after search, in whatever order all four are asked for; the
        # other two are scanned from disk.
        order = names if turn % 2 == 0 else names[::-1]
        with cache.lease([request_for(name) for name in order]) as leased:
            assert {name for name, answer in zip(order, leased, strict=True) if answer.cold} == {"c", "d"}
            assert [answer.segment.tokens.tobytes() for answer in leased] == expected
    counters = cache.counters
    assert (counters.hits, counters.cold, counters.evictions, counters.derivations) == (8, 10, 0, 4)
    assert counters.cold_bytes == 10 * NBYTES
    assert cache.size.resident_bytes == 2 * NBYTES


def test_a_segment_larger_than_the_budget_evicts_nobody(open_cache):
    cache = open_cache(capacity=NBYTES + 10)
    use(cache, "a")
    large = random_corpus(2, 60, dim=8, longest=9).segment(name="large.lance")
    with cache.lease([SegmentRequest(large.key, lambda: large)]) as [leased]:
        assert leased.cold
        assert leased.segment.nbytes > NBYTES + 10
    assert cache.is_resident(request_for("a").key)


def test_a_full_disk_costs_speed_and_no_answer(open_cache, monkeypatch, caplog):
    cache = open_cache()

    def full(segment, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_segment", full)
    with caplog.at_level(logging.WARNING):
        hits = search(cache, request_for("a"))
    assert [hit.id for hit in hits] == [name for name, _ in CORPUS.ranking()]
    assert "No space left" in caplog.text
    assert "free space" in caplog.text
    assert cache.counters.write_failures == 1
    assert search(cache, must_not_derive("a")) == hits
    assert (cache.size.cached_bytes, cache.size.resident_bytes) == (0, NBYTES)


def test_a_damaged_file_is_removed_though_the_disk_is_full(open_cache, tmp_path, monkeypatch):
    cache = open_cache(capacity=0)
    use(cache, "a")
    cache.close()
    path = tmp_path / "cache" / request_for("a").key.file_name
    path.write_bytes(damage_end(path.read_bytes()))

    def full(segment, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_segment", full)
    again = open_cache()
    assert len(search(again, request_for("a"))) > 0
    assert not path.exists()


def test_one_that_cannot_be_derived_does_not_fail_the_others(open_cache):
    cache = open_cache()

    def fail():
        raise LookupError("no such version")

    with cache.lease([replace(request_for("a"), derive=fail), request_for("b")]) as [bad, good]:
        assert isinstance(bad.failure, LookupError)
        assert bad.segment is None
        assert good.segment.rows == 12
    # The failure isn't remembered.
    assert use(cache, "a") is False


def test_two_scorers_cannot_share_a_folder(open_cache):
    first = open_cache()
    with pytest.raises(CacheFolderInUse, match="cache_dir"):
        open_cache()
    first.close()
    open_cache()
    with pytest.raises(RuntimeError, match="closed"), first.lease([request_for("a")]):
        pass


def test_two_hundred_deletions_rebuild_no_segment(open_cache):
    cache = open_cache()
    rng = np.random.default_rng(0)
    derived = []
    for _ in range(200):
        deleted = rng.random(12) < 0.5
        hits = search(cache, request_for("a", derived), visible=visible_rows(12, deleted))
        assert [hit.id for hit in hits] == [name for name, _ in CORPUS.ranking(np.flatnonzero(~deleted))]
    assert derived == ["a"]
    assert (cache.counters.derivations, cache.counters.mapped) == (1, 0)


def test_many_threads_asking_for_one_segment_derive_it_once(open_cache):
    cache = open_cache()
    entered, release = threading.Event(), threading.Event()
    derived = []
    plain = request_for("a")

    def derive():
        derived.append(threading.get_ident())
        entered.set()
        assert release.wait(10)
        return plain.derive()

    def ask():
        with cache.lease([replace(plain, derive=derive)]) as [leased]:
            return leased.segment

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask)
        assert entered.wait(10)
        others = [pool.submit(ask) for _ in range(7)]
        # Another segment isn't held up meanwhile.
        assert use(cache, "b") is False
        release.set()
        assert {id(answer.result(10)) for answer in [first, *others]} == {id(first.result())}
    assert len(derived) == 1
    assert cache.counters.derivations == 2


def test_those_who_wait_for_a_failing_derivation_get_its_error_and_the_next_may_succeed(open_cache):
    cache = open_cache()
    entered, release = threading.Event(), threading.Event()

    def fail():
        entered.set()
        assert release.wait(10)
        raise LookupError("gone")

    def ask():
        with cache.lease([replace(request_for("a"), derive=fail)]) as [leased]:
            return leased.failure

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask)]
        assert entered.wait(10)
        answers += [pool.submit(ask), pool.submit(ask)]
        release.set()
        assert all(isinstance(answer.result(10), LookupError) for answer in answers)
    assert use(cache, "a") is False


def test_threads_over_a_small_budget_always_get_right_answers(open_cache):
    cache = open_cache(capacity=2 * NBYTES)
    expected = search(open_cache(folder=cache._folder.parent / "roomy"), request_for("a"), request_for("b"))
    barrier = threading.Barrier(6)

    def work(seed):
        rng = np.random.default_rng(seed)
        barrier.wait(10)
        for _ in range(40):
            pair = rng.choice(list("abcde"), size=2, replace=False)
            assert search(cache, *map(request_for, pair)) == expected
            assert cache.size.resident_bytes <= 2 * NBYTES

    with ThreadPoolExecutor(6) as pool:
        for outcome in [pool.submit(work, seed) for seed in range(6)]:
            outcome.result(60)
    # Every use was given back: anything can be evicted again.
    assert all(resident.users == 0 for resident in cache._residents.values())
    assert cache._loading == {}
