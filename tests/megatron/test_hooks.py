"""Where ARO reaches into Megatron is where it was: the first test to fail with a new Megatron."""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest

from megatron_aro.megatron import chain, hooks, wrappers
from megatron_aro.version import TESTED


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: f"{hook.module}.{hook.name}")
def test_the_hook_is_where_it_was(hook):
    """Module, attribute and parameters of the installed Megatron's original."""
    assert not hooks._moved(hook)


@pytest.mark.parametrize(
    "ours",
    [
        chain.AROChainedOptimizer,
        wrappers.LoadableDistributedOptimizer,
        wrappers.ARODistributedOptimizer,
    ],
)
def test_what_is_overridden_exists(ours):
    """A method that Megatron renames would be overridden in vain; it keeps its parameters, too."""
    (parent,) = ours.__bases__
    for name, mine in vars(ours).items():
        if inspect.isroutine(mine) or isinstance(mine, property):
            theirs = getattr(parent, name, None)
            assert theirs is not None, f"{parent.__module__}: {parent.__name__}.{name} is gone"
            if inspect.isroutine(mine) and name != "__init__":
                assert accepts(mine, theirs), f"{name} takes {inspect.signature(theirs)}"


def accepts(mine, theirs) -> bool:
    """Whether what Megatron passes by `theirs` can be passed to `mine`, by position or name."""
    given = list(inspect.signature(theirs).parameters.values())
    taken = list(inspect.signature(mine).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return True
    named = [p.name for p in given if p.kind is not p.VAR_KEYWORD]
    mine_too = [p.name for p in taken]
    return mine_too[: len(named)] == named and (
        len(mine_too) == len(named) or len(named) < len(given)
    )


def moved_away(monkeypatch, hook, replacement):
    """As a new Megatron would have it: nothing registered yet, one hook moved."""
    monkeypatch.setattr(hooks, "_in_place", set())
    monkeypatch.setattr(importlib.import_module(hook.module), hook.name, replacement)


SAVE = next(hook for hook in hooks.HOOKS if hook.name == "save_checkpoint")


def test_a_moved_hook_is_named_before_anything_is_wrapped(monkeypatch):
    """Other parameters: the sentence says whose, what was found, and what to install."""

    def save_checkpoint(model, iteration, optimizer):
        pass

    moved_away(monkeypatch, SAVE, save_checkpoint)
    before = {hook: getattr(*hooks._place(hook)) for hook in hooks.HOOKS}
    with pytest.raises(RuntimeError) as raised:
        hooks.register()
    said = str(raised.value)
    assert "megatron.training.training.save_checkpoint takes (model, iteration, optimizer)" in said
    assert said.count("takes") == 1 and said.endswith(f"{TESTED['megatron-core'][-1]}.")
    assert all(getattr(*hooks._place(hook)) is before[hook] for hook in hooks.HOOKS)


def test_a_hook_that_is_gone_is_named(monkeypatch):
    """An attribute that a module no longer has, and a module that is no longer there."""
    monkeypatch.setattr(hooks, "_in_place", set())
    monkeypatch.delattr(importlib.import_module(SAVE.module), SAVE.name)
    elsewhere = SAVE._replace(module="megatron.training.elsewhere")
    monkeypatch.setattr(hooks, "HOOKS", (SAVE, elsewhere))
    with pytest.raises(RuntimeError, match=r"training\.save_checkpoint is gone .*elsewhere\.save_"):
        hooks.register()


@pytest.mark.parametrize(
    "parameters, fits",
    [
        ("iteration, model, optimizer", True),
        ("iteration, model, optimizer, new=None", True),  # "...": more may follow
        ("iteration, model", False),
        ("iteration, model, optim", False),
        ("*args, **kwargs", True),  # somebody's wrapper: nothing can be told
    ],
)
def test_parameters_are_compared_as_the_wrapper_takes_them(monkeypatch, parameters, fits):
    """By name and order; what follows "..." is handed on whatever it is."""
    moved_away(monkeypatch, SAVE, eval(f"lambda {parameters}: None"))
    assert (not hooks._moved(SAVE)) == fits
    exact = next(hook for hook in hooks.HOOKS if hook.name == "_get_megatron_emerging_optimizer")
    named = exact.parameters.replace(" ", ", ")
    for more, same in (("", True), (", dump=None", False)):
        moved_away(monkeypatch, exact, eval(f"lambda {named}{more}: None"))
        assert (not hooks._moved(exact)) == same


def test_a_wrapped_hook_is_judged_by_what_it_wraps(monkeypatch):
    """functools.wraps tells, ours included: registering leaves nothing to misjudge."""
    hooks.register()
    for hook in hooks.HOOKS:
        assert not hooks._moved(hook)
    moved_away(monkeypatch, SAVE, functools.wraps(lambda other: None)(lambda *args: None))
    assert "takes (other)" in hooks._moved(SAVE)
