"""Which model trains under which name: one that was made anew does not go on with what another has learned."""

from __future__ import annotations

import gc

import tiny

from hivenb.swarm.run_names import RunNames


def test_each_model_has_a_name_of_its_own_and_keeps_it() -> None:
    names, models = RunNames(), [tiny.TinyModel() for _ in range(3)]
    taken = []
    for model in models:
        taken.append(names.name_for("digits", model))
        names.take("digits", taken[-1], model)
    assert taken == ["digits", "digits-2", "digits-3"]
    assert [names.name_for("digits", model) for model in models] == taken
    assert names.name_for("text", models[0]) == "text"


def test_a_name_that_nobody_has_trained_under_is_still_free() -> None:
    names = RunNames()
    assert names.name_for("digits", tiny.TinyModel()) == "digits"
    assert names.name_for("digits", tiny.TinyModel()) == "digits"


def test_a_model_that_is_gone_has_had_its_name() -> None:
    names, model = RunNames(), tiny.TinyModel()
    names.take("digits", "digits", model)
    del model
    gc.collect()
    assert names.name_for("digits", tiny.TinyModel()) == "digits-2"


def test_who_goes_on_has_the_name_of_the_newest() -> None:
    names, models = RunNames(), [tiny.TinyModel() for _ in range(2)]
    names.take("digits", "digits", models[0])
    names.take("digits", "digits-2", models[1])
    assert names.name_for("digits", tiny.TinyModel(), goes_on=True) == "digits-2"
    assert names.name_for("text", tiny.TinyModel(), goes_on=True) == "text"


def test_what_somebody_has_named_with_a_number_is_left_alone() -> None:
    names, models = RunNames(), [tiny.TinyModel() for _ in range(2)]
    names.take("digits-2", "digits-2", models[0])
    names.take("digits", "digits", models[1])
    assert names.name_for("digits", tiny.TinyModel()) == "digits-3"
