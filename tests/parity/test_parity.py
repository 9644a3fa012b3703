"""Tests that PyTorch and Keras behave alike, and reasons for checks of only one of them."""

from __future__ import annotations

from typing import Any

import pytest
from launch import END, SUITE, checks_of, launch, need

BEHAVIOURS = checks_of("../parity/behaviours.py")
AMONG_MORE = (
    "check_dense_is_the_average",
    "check_hosts_of_different_size_are_refused",
    "check_two_levels_equal_simulation",
    "check_a_bad_gradient_on_one_rank",
    "check_decisions_equal_simulation",
    "check_ranks_that_disagree",
)
"""Keras' checks that are more than repeated by more ranks."""

LAUNCHES = [
    ("torch", "gloo", 2, ()),
    ("torch", "mpirun", 4, ()),
    ("keras", "gloo", 2, ()),
    ("keras", "mpirun", 4, AMONG_MORE),
]  # those over MPI are left to make test-all


@pytest.mark.launch
@pytest.mark.timeout(SUITE + 30)
@pytest.mark.parametrize(
    ("framework", "launcher", "ranks", "chosen", "check"),
    [
        pytest.param(
            *launch,
            check,
            id=f"{launch[0]}-{launch[1]}{launch[2]}-{check}",
            marks=[pytest.mark.nightly] if launch[1] == "mpirun" else [],
        )
        for launch in LAUNCHES
        for check in [*(launch[3] or BEHAVIOURS), END]
    ],
)
def test_behaviour(
    framework: str,
    launcher: str,
    ranks: int,
    chosen: tuple[str, ...],
    check: str,
    request: Any,
) -> None:
    need(launcher)
    report = launch(f"parity_{framework}_checks.py", launcher, ranks, SUITE, checks=chosen)
    request.node.user_properties.append(("seconds", report.seconds_of(check)))
    problem = report.problem(check)
    if problem:
        pytest.fail(problem, pytrace=False)


TORCH_ONLY = {
    "check_dense_equals_stock_horovod": "under Keras 3 Horovod's own wrapper averages nothing",
    "check_exchanges_leave_during_backward": "Keras hands over all gradients at once",
    "check_closures_use_averaged_gradients": "Keras' optimizers take no closure",
    "check_lbfgs_takes_the_same_turns": "Keras has no L-BFGS",
    "check_zero_grad_and_its_race": "Keras does not keep gradients with the variables",
    "check_wrapping_keeps_class_state_and_defaults": "Keras': check_config, check_save_and_load",
    "check_horovods_attributes_are_there": "Horovod's Keras wrapper has none that are public",
    "check_frozen_integers_among_the_parameters": "Keras hands over trainable variables alone",
    "check_scheduler_made_before_wrapping": "Keras': check_learning_rate_callbacks",
    "check_added_groups_are_averaged": "Keras' optimizers have no parameter groups",
    "check_layers_unfrozen_on_the_way": "Keras compiles anew, with another optimizer",
    "check_tied_weights": "a Keras layer that is used twice has one variable",
    "check_other_numbers_of_passes_than_announced": "Keras' wrapper counts calls of apply",
    "check_channels_last": "TensorFlow has no memory formats",
    "check_compiled_models": "Keras': jit_compile is refused, check_refusals",
    "check_copies_and_pickles": "Keras': check_config, check_save_and_load",
    "check_broadcast_of_an_optimizer_without_state": "Keras does not keep gradients",
    "check_broadcasting_optimizer_state_leaves_weights_alone": "Keras' callback broadcasts both",
    "check_sharded_parameters_are_refused": "Keras': tf.distribute is refused, check_refusals",
}
"""Check of torch_checks.py: why keras_checks.py has none of that name."""

KERAS_ONLY = {
    "check_sparse_methods_in_fit": "PyTorch traces nothing",
    "check_other_methods_in_fit": "PyTorch traces nothing",
    "check_fit_without_callback_and_stock_compression": "PyTorch traces nothing",
    "check_all_ways_of_running_agree": "PyTorch has one",
    "check_accordion_switches_in_fit": "PyTorch traces nothing",
    "check_fitting_again_traces_nothing_anew": "PyTorch traces nothing",
    "check_several_steps_per_execution": "PyTorch calls step each time",
    "check_custom_loops": "PyTorch has no others",
    "check_two_optimizers_in_one_function": "PyTorch traces nothing",
    "check_gradients_of_several_passes_are_averaged": "Horovod's option exists for TensorFlow",
    "check_layers_that_are_local": "Horovod's function exists for Keras",
    "check_missing_and_local_gradients": "Horovod's register_local_var exists for TensorFlow",
    "check_generators_that_cannot_be_traced": "PyTorch traces nothing",
    "check_phases_are_traced_anew": "PyTorch traces nothing",
    "check_learning_rate_callbacks": "PyTorch's: check_scheduler_made_before_wrapping",
    "check_momentum_correction": "PyTorch's momentum does not contain the learning rate",
    "check_metric_average": "Horovod has no callbacks for PyTorch",
    "check_learning_rate_fall_makes_layers_critical": "Horovod has no callbacks for PyTorch",
    "check_save_and_load": "PyTorch's: check_copies_and_pickles",
    "check_models_from_hdf5_train_on": "PyTorch has no such files",
    "check_variables_in_turn": "PyTorch's: check_layers_in_turn",
    "check_sums_of_passes_without_some_gradients": "PyTorch adds up gradients itself",
    "check_config": "PyTorch's: check_copies_and_pickles",
    "check_the_first_change_of_levels_in_fit": "PyTorch traces nothing",
    "check_compiling_anew_without_a_loss": "PyTorch traces nothing",
    "check_settings_that_a_config_lacks": "PyTorch's wrapper keeps the optimizer's attributes",
    "check_graphs_with_other_gradients_are_refused": "PyTorch traces nothing",
    "check_warm_up_within_an_epoch": "Horovod has no callbacks for PyTorch",
    "check_guard_in_fit": "the callback compares; PyTorch has none",
}
"""Check of keras_checks.py: why torch_checks.py has none of that name."""


@pytest.mark.parametrize(
    ("script", "other", "reasons"),
    [
        ("torch_checks.py", "keras_checks.py", TORCH_ONLY),
        ("keras_checks.py", "torch_checks.py", KERAS_ONLY),
    ],
)
def test_a_missing_twin_has_a_reason(script: str, other: str, reasons: dict[str, str]) -> None:
    alone = set(checks_of(script)) - set(checks_of(other))
    assert alone == set(reasons), f"twins are missing or there: {alone ^ set(reasons)}"


def test_no_behaviour_is_written_twice() -> None:
    for script in ("torch_checks.py", "keras_checks.py"):
        assert not set(checks_of(script)) & set(BEHAVIOURS), script
