"""Salts of the prefix cache after a plan that was not in force."""

from rheostat_engine import OPEN_END, Addition, Capture, Installed, Plan, Released
from rheostat_server.cache_salts import CacheSalts


def plan(name: str, scale: float = 1.0) -> Plan:
    return Plan(name, (Addition(bytes(32), ((1, 0),), scale, ((0, OPEN_END),)),))


def released(name: str) -> Released:
    return Released(
        request_id=name,
        tokens_added=(0,),
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, 0),
    )


def test_plans_that_were_in_force_share_the_salt_of_their_content() -> None:
    salts = CacheSalts()
    first = salts.take(plan("a"))
    salts.hear(Installed("a", ""))
    salts.hear(released("a"))
    assert first == salts.take(plan("b")) == plan("a").cache_salt()
    assert salts.take(Plan("c", captures=(Capture((1,), ((0, 1),)),))) is None


def test_a_plan_that_was_not_in_force_spoils_its_salt_and_no_other() -> None:
    salts = CacheSalts()
    salt = salts.take(plan("a"))
    other = salts.take(plan("b", scale=2.0))
    salts.hear(Installed("a", "no such vector"))
    salts.hear(released("a"))
    again = salts.take(plan("c"))
    assert (again, salts.take(plan("d"))) == (f"{salt}.1", f"{salt}.1")
    assert salts.take(plan("e", scale=2.0)) == other
    salts.hear(Installed("c", "no such vector"))
    assert salts.take(plan("f")) == f"{salt}.2"
