"""The methods of a process alone return their arguments, and all teams have the same methods."""

import inspect
import pickle
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from curvlinops.team.shards import WHOLE
from curvlinops.team.team import ALONE, ShardedTeam, Team, largest, team_of


def test_interface():
    """Whoever calls a method need not ask which class it is of."""
    for name, method in vars(Team).items():
        if not name.startswith("_") and inspect.isfunction(method):
            ours, theirs = (inspect.signature(getattr(x, name)) for x in (Team, ShardedTeam))
            assert list(ours.parameters.values()) == list(theirs.parameters.values()), name


def test_alone_returns_arguments():
    x, columns = torch.ones(2), {"a": torch.ones(1, 2)}
    for same in (ALONE.add(x), ALONE.joined(x, 2), ALONE.broadcast(x, 0)):
        assert same is x
    assert ALONE.gather_objects("a") == ["a"]
    assert ALONE.largest(3) == 3
    assert [ALONE.any(lambda answer=answer: answer) for answer in (False, True)] == [False, True]
    assert ALONE.add_all(columns, x.device) == ALONE.exchange(columns, x.device) == columns
    assert ALONE.peers is ALONE.adding is ALONE.in_step is ALONE
    assert (ALONE.size, ALONE.rank, ALONE.number(7)) == (1, 0, 7)


def test_alone_asks_nobody():
    """Contexts do nothing, and a task has its numbers; what is compared is not computed."""
    x = torch.ones(1, 2)
    with (
        ALONE.task(lambda: 1 / 0, x, None) as totals,
        ALONE.summing({}, None, None),
        ALONE.sharing({}),
        ALONE.sending(),
        ALONE.raise_on_all_ranks(),
        ALONE.raise_once(),
    ):
        totals["weight"] += 2.0
        ALONE.check_same(x)
    assert totals["weight"] == 2.0
    with pytest.raises(KeyError), ALONE.raise_on_all_ranks():
        raise KeyError


def test_teams():
    assert type(team_of(None)) is Team
    assert largest([]) is ALONE
    two = Team(SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    assert (two.is_alone, two.rank, two.number(7)) == (False, 1, 15)
    assert largest([ALONE, two, team_of(None)]) is two
    assert deepcopy(two) is two
    assert pickle.loads(pickle.dumps(ALONE)).size == 1
    assert not pickle.loads(pickle.dumps(WHOLE))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(two)
    with pytest.raises(TypeError, match="process_group must be"):
        team_of("a group")
