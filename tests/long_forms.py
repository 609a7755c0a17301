# ruff: noqa: E501 - an id is one word
"""Tests that `make test` leaves to `make test-all`. Each takes seconds, and a shorter form beside
it shows the same with a smaller model or another recipe."""

#: The beginning of a test's id under tests/, and the forms of the test that stay.
LONG_FORMS = {
    "models/test_models.py::test__compiled__equals_eager[gru": "rnn",
    "models/test_models.py::test__compiled__equals_eager[lstm": "rnn",
    "models/test_models.py::test__compiled__equals_eager[unet": "resnet",
    "models/test_models.py::test__five_steps__follow_float32[gru": "lstm, rnn",
    "models/test_models.py::test__loss_times_a_power_of_two__trains_to_the_same_bits[gru-": "lstm",
    "models/test_models.py::test__loss_times_a_power_of_two__trains_to_the_same_bits[resnet--": "40",
    "models/test_models.py::test__loss_times_a_power_of_two__trains_to_the_same_bits[unet--": "40",
    "models/test_models.py::test__loss_times_a_power_of_two__trains_to_the_same_bits[lstm--": "40",
    "unit_scale/test_unit_scale_gradients.py::test__compiled__they_are_the_same[Layers": "Pair",
    "unit_scale/test_unit_scale_gradients.py::test__compiled__they_are_the_same[Language": "Pair",
    "unit_scale/test_unit_scale_gradients.py::test__compiled__they_are_the_same[Normed": "Gated",
    "unit_scale/test_unit_scale_gradients.py::test__compiled__they_are_the_same[InPlace": "Beside",
    "unit_scale/test_unit_scale_gradients.py::test__compiled__they_are_the_same[Nested": "Looped",
    "unit_scale/test_unit_scale_transformers.py::test__compiled__it_is_the_same": "the one of BERT",
    "recipes/test_recipe_products.py::test__compiled__is_eager[mxfp6": "mxfp8, mxfp4",
    "recipes/test_recipe_products.py::test__compiled__is_eager[mxfp8 floor": "mxfp8",
    "recipes/test_recipe_products.py::test__compiled__is_eager[blockwise, powers": "blockwise",
    "recipes/test_recipe_products.py::test__three_products__are_those_of_the_casts_written_out"
    "[(32, 64, 48)": "(20, 33, 65)",
    "recipes/test_recipe_products.py::test__few_graphs__serve_every_number_of_rows[Current(gran": "Current()",
    "recipes/test_store_frozen.py::test__compiled__they_are_as_well[MinMSE": "Current, Unit",
    "recipes/test_store_frozen.py::test__compiled__they_are_as_well[Delayed": "Current, Unit",
    "fuzz/test_programs.py::test__a_planted_fault__is_found_and_made_small[<lambda>0": "the sign",
    "fuzz/test_programs.py::test__a_planted_fault__is_found_and_made_small[<lambda>2": "the sign",
    "integration/test_modes_compiled.py::test__sizes_that_change__are_one_graph[check": "attention",
    "integration/test_modes_compiled.py::test__images_that_change__are_the_eager_bits[ad": "pooling",
    "integration/test_modes_compiled.py::test__images_that_change__are_the_eager_bits[in": "pooling",
    "integration/test_compile.py::test__forward_and_backward_equal_eager[llama": "gpt, one_layer",
    "integration/test_compile_borders.py::test__the_sum_of_what_a_compiled_model_returns__under_each"
    "_recipe[mxfp8": "current, unit",
    "integration/test_transformers.py::test__training__falls_as_in_float32[Mamba": "Llama and others",
    "integration/test_transformers.py::test__training__falls_as_in_float32[Whisper": "T5",
    "integration/test_loss_factor.py::test__a_factor_of_the_loss__changes_no_bit_of_a_training[lstm"
    "-adamw": "lstm-sgd",
    "distributed/test_tensor_parallel.py::test__beside_fully_shard__losses_are_those_of_one_process"
    "[wide": "unit",
    "distributed/test_tensor_parallel.py::test__a_training__has_the_losses_of_one_process[wide": "unit",
    "distributed/test_traffic_benchmark.py::test__each_formula__gives_what_is_counted[FSDP2, weights": "both in FP8",
    "distributed/test_ddp.py::test__a_training__is_that_of_one_process_that_accumulates[cur": "unit",
    "compat/test_compat_torchao.py::test__the_program_of_the_current_readme__trains[rowwise_": "rowwise",
    "test_guard.py::test__a_calibrated_model__is_as_near_in_inference_and_compiled[blurs": "one_sign",
    "nn/test_nn_blocks.py::test__a_compiled_decoder__trains_like_the_eager_one[True": "False",
    "test_optim.py::test__a_compiled_step__is_the_eager_one[amsgrad": "adam",
    "test_optim.py::test__a_compiled_step__is_the_eager_one[nesterov": "momentum",
    "test_optim.py::test__a_compiled_step__is_the_eager_one[rmsprop_centered": "rmsprop",
    "benchmarks_quick/test_linear_benchmark.py::test__linear__prints_every_row_with_its_ratios"
    "[False-bias, comp": "eager",
    "demo/test_cli.py::test__a_process_of_torchrun__leaves_without_ending_the_interpreter[False": "True",
    "test_infinities.py::test__an_input_that_is_not_finite__makes_such_a_loss_and_gradient[mxfp4-com": "mxfp8",
    "test_infinities.py::test__an_input_that_is_not_finite__makes_such_a_loss_and_gradient[min_mse-c": "nvfp4",
    "compat/test_compat_torchao.py::test__the_program_of_the_current_readme__trains[rowwise]": "tensorwise",
    "distributed/test_fsdp.py::test__every_recipe__trains_sharded_as_alone[Current()": "Delayed, MXFP8, Unit",
    "distributed/test_reduce.py::test__scaled_models__train_as_with_plain_reductions__bit_identical_under_a"
    "_multiplier[fsdp-wire1": "ddp",
    "integration/test_transformers.py::test__training__is_the_same_parameter_by_parameter[Mamba": "Llama, Mixtral",
    "ops/test_hardware.py::test_compiled_code_calls_the_units_too[by row": "blocks, mx",
    "quantization/test_export.py::test__decomposed__blocks_that_do_not_divide_a_weight_leave_aten_only"
    "[Dynamic(e4m3fn amax": "microscale",
    "recipes/test_delayed.py::test__of_gpt2__every_weight_has_a_history[True": "False",
}
