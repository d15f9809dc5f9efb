"""Which cluster an address means: one that answers, or an error at once that says what to give instead."""

import socket

import pytest

from tpbed.tp import ray_cluster
from tpbed.tp.ray_cluster import InitError

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_an_address_where_nobody_listens_is_refused():
    with socket.socket() as held:
        held.bind(("", 0))
        with pytest.raises(InitError, match="does not answer .*refused.*without either a local Ray is started"):
            ray_cluster.find(f"127.0.0.1:{held.getsockname()[1]}")


def test_a_server_that_is_no_ray_is_refused_before_ray_waits_for_it(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_ANSWER_S", 0.01)
    mute = socket.create_server(("", 0))
    with mute, pytest.raises(InitError, match="what listens at .* did not answer"):
        ray_cluster.find(f"127.0.0.1:{mute.getsockname()[1]}")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("foo", "Invalid address format: foo"),
        ("ray://foo:10001", "on a node of the cluster"),
        ("no.invalid:1", "does not answer"),
    ],
)
def test_what_is_no_address_is_refused_by_name(monkeypatch, address, told):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InitError, match=told):
        ray_cluster.find(None)


def test_auto_is_left_to_ray_which_then_uses_the_token_of_this_user(monkeypatch):
    with socket.create_server(("", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(ray_cluster, "canonicalize_bootstrap_address", lambda _address: place)
        assert ray_cluster.find("auto") == "auto"
    with pytest.raises(InitError, match="does not answer"):
        ray_cluster.find("auto")  # a cluster that has ended, and is still remembered


def test_an_address_that_is_given_goes_before_the_one_in_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    assert ray_cluster.find("local") is None


def test_without_an_address_a_ray_is_started_here():
    assert ray_cluster.find(None) is None
