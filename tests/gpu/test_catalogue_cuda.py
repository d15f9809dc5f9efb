"""The catalogue on simulated ranks that share a device, with its kernels: each scenario shows what it claims there."""

from dataclasses import replace

import pytest
import torch
from alone import run_alone

from tpbed.harness.runner import run_scenario
from tpbed.harness.scenario import Expected
from tpbed.harness.smollm2 import missing_checkpoint
from tpbed.scenarios import CATALOGUE
from tpbed.selector.topk import has_flashinfer
from tpbed.selector.triton_topk import has_triton
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACE = "cuda:0"
SIMULATED = {name: scenario for name, scenario in CATALOGUE.items() if "sim" in scenario.worlds}
SPOILS_THE_CONTEXT = ["loading/ids-beyond-the-table"]  # an assertion in a kernel: nothing of its process works after it
SIMULATED = {name: scenario for name, scenario in SIMULATED.items() if name not in SPOILS_THE_CONTEXT}
OPEN_ON_THE_CPU = ["ties/torch-topk-tp1", "ties/torch-topk-tp4"]
CONTRACT = [name for name, scenario in SIMULATED.items() if scenario.topk == "contract"]
OF_ANY_DTYPE = ["loading/buffer-of-packed-dtype-unchecked"]  # the canonical top-k on the CPU takes any
CANONICAL = [name for name, scenario in SIMULATED.items() if scenario.topk == "canonical" and name not in OF_ANY_DTYPE]


def check(name: str, **changes: object) -> None:
    if name.startswith("real/") and missing_checkpoint():
        pytest.skip(missing_checkpoint())
    scenario = replace(SIMULATED[name], **changes)
    with SimulatedWorld(scenario.world_size, device=PLACE) as world:
        verdict = run_scenario(world, scenario, seed=7)
    causes = [cause.text for finding in verdict.unexpected for cause in finding.causes]
    assert verdict.status == "PASS", (verdict.unexpected, verdict.not_found, verdict.doubts, causes)


@pytest.mark.parametrize("name", [name for name in SIMULATED if name not in OPEN_ON_THE_CPU])
def test_every_scenario_shows_on_a_device_what_it_claims(name):
    check(name)


@pytest.mark.parametrize("name", OPEN_ON_THE_CPU)
def test_of_equal_values_torch_keeps_the_lowest_ids_on_a_device_where_on_the_cpu_it_does_not(name):
    """Seen on one H200 with torch 2.11, and promised nowhere: the merge orders what was kept, so that nothing is wrong.

    That torch.topk still orders equals as it likes there is what adapters/vllm-ties and adapters/sglang-ties show.
    """
    assert SIMULATED[name].expect
    check(name, expect=())


@pytest.mark.skipif(not has_flashinfer(), reason="flashinfer is not installed: pip install 'tpbed[gpu]'")
@pytest.mark.parametrize("name", CONTRACT)
def test_scenarios_of_the_contract_show_the_same_with_the_kernel_whose_contract_it_is(name):
    check(name, topk="default")


@pytest.mark.skipif(not has_triton(), reason="triton is not installed: install a torch that is built for CUDA")
@pytest.mark.parametrize("name", CANONICAL)
def test_scenarios_of_the_canonical_order_show_the_same_with_the_triton_kernels(name):
    check(name, topk="triton")


@pytest.mark.skipif(not has_triton(), reason="triton is not installed: install a torch that is built for CUDA")
@pytest.mark.parametrize("name", OF_ANY_DTYPE)
def test_the_triton_kernels_refuse_logits_of_other_dtypes_on_every_rank_alike(name):
    check(name, topk="triton", expect=(Expected(kind="crash_all", says="in float16, bfloat16 or float32"),))


@pytest.mark.parametrize("name", SPOILS_THE_CONTEXT)
def test_what_an_assertion_in_a_kernel_ends_is_told_and_spoils_its_process_alone(name):
    """Why these are in no other test: in eager mode they raise on the CPU; a device raises later, from any call."""
    ended = run_alone(f"""
        from dataclasses import replace
        from tpbed.harness.runner import run_scenario
        from tpbed.scenarios import CATALOGUE
        from tpbed.tp.simulated import SimulatedWorld
        scenario = CATALOGUE[{name!r}]
        world = SimulatedWorld(scenario.world_size, device={PLACE!r})
        verdict = run_scenario(world, scenario, seed=7)
        print(verdict.status, verdict.doubts, verdict.unexpected)
    """)
    assert "device-side assert" in ended.stdout + ended.stderr and "PASS" not in ended.stdout
