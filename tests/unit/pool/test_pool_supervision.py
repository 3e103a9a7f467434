import pytest

from phasemesh.pool.breaker import CrashLoopBreaker
from phasemesh.pool.placement import Resources, check_fit, need_per_replica
from phasemesh.pool.protocol import ReplicaState
from phasemesh.pool.replica import Replica
from phasemesh.pool.settings import PoolConfig, PoolStartError
from phasemesh.pool.worker import WorkerReport


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_breaker_trips_at_the_limit_within_the_window_and_stays():
    clock = Clock()
    breaker = CrashLoopBreaker(3, 10.0, clock)
    assert not breaker.record()
    clock.now += 5
    assert not breaker.record()
    clock.now += 5  # the first has just left the window
    assert not breaker.record()
    clock.now += 1
    assert breaker.record()
    clock.now += 1000
    assert breaker.tripped


def test_breaker_lets_slow_restarts_go_on_for_ever():
    clock = Clock()
    breaker = CrashLoopBreaker(2, 10.0, clock)
    for _ in range(50):
        clock.now += 11
        assert not breaker.record()


def report(incarnation: str, pid: int = 1) -> WorkerReport:
    return WorkerReport(incarnation, pid, "cpu", (), 2, 0)


def test_a_lost_connection_is_not_a_restart_but_a_new_incarnation_is():
    clock = Clock()
    replica = Replica("r", None, PoolConfig(clock=clock))
    assert not replica.answered(report("a"))
    assert replica.quarantine()
    assert not replica.quarantine()
    assert replica.stats(1, draining=False).state is ReplicaState.RESTARTING
    clock.now += 7
    assert replica.away_s == 7
    assert not replica.answered(report("a"))
    assert replica.away_s == 0
    assert replica.stats(1, draining=False).restarts == 0
    replica.quarantine()
    assert replica.answered(report("b", pid=2))
    stats = replica.stats(1, draining=False)
    assert (stats.restarts, stats.pid, stats.state) == (1, 2, ReplicaState.READY)


def test_a_restart_that_a_suspected_batch_caused_is_counted_but_not_held_against_the_replica():
    replica = Replica("r", None, PoolConfig(crash_limit=2))
    replica.answered(report("a"))
    for incarnation in ("b", "c", "d"):
        replica.excuse()
        replica.answered(report(incarnation))
    assert not replica.breaker.tripped
    assert replica.stats(0, draining=False).restarts == 3
    replica.answered(report("e"))
    assert not replica.breaker.tripped
    replica.answered(report("f"))
    assert replica.breaker.tripped


def test_draining_is_shown_for_healthy_replicas_only():
    replica = Replica("r", None, PoolConfig())
    replica.answered(report("a"))
    assert replica.stats(0, draining=True).state is ReplicaState.DRAINING
    replica.fail()
    assert replica.stats(0, draining=True).state is ReplicaState.FAILED


def test_fit_counts_per_node_because_an_actor_does_not_span_nodes():
    nodes = (Resources(1, 0), Resources(1, 0))
    check_fit(2, Resources(1, 0), nodes)
    with pytest.raises(PoolStartError, match=r"1 replica\(s\) need 2 CPU and 0 GPU each.*1 CPU and 0 GPU"):
        check_fit(1, Resources(2, 0), nodes)


def test_fit_counts_gpus():
    nodes = (Resources(8, 2),)
    check_fit(2, Resources(1, 1), nodes)
    with pytest.raises(PoolStartError, match="8 CPU and 2 GPU, which holds 2"):
        check_fit(3, Resources(1, 1), nodes)
    with pytest.raises(PoolStartError, match="no node"):
        check_fit(1, Resources(1, 0), ())


def test_auto_takes_a_gpu_where_there_is_one():
    cpu, gpu = (Resources(4, 0),), (Resources(4, 0), Resources(4, 1))
    assert need_per_replica(PoolConfig(), cpu).gpus == 0
    assert need_per_replica(PoolConfig(), gpu).gpus == 1
    assert need_per_replica(PoolConfig(device="cpu"), gpu).gpus == 0
    assert need_per_replica(PoolConfig(device="cuda"), cpu).gpus == 1


@pytest.mark.parametrize("field", ["replicas", "cpus_per_replica", "threads", "crash_limit"])
def test_config_names_the_field(field: str):
    with pytest.raises(ValueError, match=f"^{field} is 0"):
        PoolConfig(**{field: 0})
