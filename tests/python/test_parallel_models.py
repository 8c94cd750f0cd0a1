"""Hugging Face models inside dspattn.parallel.context: unchanged, on pieces, with the logits and gradients of one
process."""

import os

import pytest
import torch

import dspattn
import tiny_models
from dspattn import parallel
from parallel_pool import Failure, Pool

transformers = pytest.importorskip("transformers")

LENGTH = 400


@pytest.fixture(scope="module")
def pool():
    opened = Pool(world=2)
    yield opened
    opened.close()


def tokens(length=LENGTH):
    return torch.randint(0, 60, (1, length), generator=torch.Generator().manual_seed(5))


def model_of(kind, window=None):
    model = tiny_models.encoder() if kind == "encoder" else tiny_models.decoder()
    if window is not None:
        config = transformers.MistralConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, sliding_window=window,
        )  # fmt: skip
        torch.manual_seed(4)
        model = transformers.MistralForCausalLM(config).eval()
    model.set_attn_implementation("dspattn_2_4")
    return model


def output_of(model, **inputs):
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def on_rank(group, rank, kind, method, window):
    model = model_of(kind, window)
    positions = parallel.position_ids(LENGTH, group)[None]
    with torch.no_grad(), parallel.context(group, method):
        out = output_of(model, input_ids=parallel.shard(tokens(), 1, group), position_ids=positions)
    return parallel.unshard(out, 1, group).numpy()


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("kind, window", [("decoder", None), ("decoder", 150), ("encoder", None)])
def test_a_model_gives_what_it_gives_in_one_process(pool, kind, window, method):
    with torch.no_grad():
        wanted = output_of(model_of(kind, window), input_ids=tokens())
    for result in pool.run(on_rank, kind, method, window, size=2):
        assert not isinstance(result, Failure), result
        torch.testing.assert_close(torch.from_numpy(result), wanted, atol=2e-5, rtol=1e-4)


def one_row_on_rank(group, rank):
    """The mean's sums of a cache, which a model outside has asked for, are of whole sequences."""
    model = tiny_models.decoder()
    model.set_attn_implementation("dspattn_2_4_mean")
    with torch.no_grad():
        whole = output_of(model, input_ids=tokens(129))
        with parallel.context(group):
            positions = parallel.position_ids(129, group)[None]
            piece = output_of(model, input_ids=parallel.shard(tokens(129), 1, group), position_ids=positions)
    return (piece - parallel.shard(whole, 1, group)).abs().max().item()


def test_a_rank_with_one_row_has_no_step_of_generation(pool):
    for difference in pool.run(one_row_on_rank, size=2):
        assert not isinstance(difference, Failure) and difference < 2e-5, difference


def step_on_rank(group, rank, method):
    """One training step: the loss's share of each rank, and gradients added up over ranks."""
    model = model_of("decoder")
    pieces = {
        "input_ids": parallel.shard(tokens(), 1, group),
        "position_ids": parallel.position_ids(LENGTH, group)[None],
        "shift_labels": parallel.shard_labels(tokens(), 1, group),
    }
    with parallel.context(group, method):
        loss = model(**pieces, labels=pieces["shift_labels"], num_items_in_batch=LENGTH - 1).loss
        loss.backward()
    return added_up(model, loss, group)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_a_training_step_has_the_gradients_of_one_process(pool, method):
    model = model_of("decoder")
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    for result in pool.run(step_on_rank, method, size=2):
        assert not isinstance(result, Failure), result
        total, gradients = result
        assert total == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(torch.from_numpy(gradients[name]), parameter.grad, atol=2e-5 * scale, rtol=1e-4)


def step_with_accelerate(group, rank):
    """The same step by Accelerate: it averages gradients over processes, so each share of the loss counts twice."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model = model_of("decoder")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    labels = parallel.shard_labels(tokens(), 1, group)
    with parallel.context(group):
        loss = model(
            input_ids=parallel.shard(tokens(), 1, group), position_ids=parallel.position_ids(LENGTH, group)[None],
            shift_labels=labels, labels=labels, num_items_in_batch=LENGTH - 1,
        ).loss  # fmt: skip
        accelerator.backward(loss * accelerator.num_processes)
    optimizer.step()
    plain = accelerator.unwrap_model(model)
    return type(model).__name__, {name: p.detach().numpy() for name, p in plain.named_parameters()}


def test_a_training_step_under_accelerate(pool):
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    model = model_of("decoder")
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for result in pool.run(step_with_accelerate, size=2):
        assert not isinstance(result, Failure), result
        wrapper, parameters = result
        assert wrapper == "DistributedDataParallel"
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.from_numpy(parameters[name]), parameter.detach(), atol=1e-5, rtol=1e-4)


WHOLE = 512  # divides by 256 ranks, as context_parallel's cuts must to be ours


def shifted(ids):
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def added_up(model, loss, group):
    """Loss and gradients, summed over ranks."""
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=group)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)
    return float(total), {name: p.grad.numpy() for name, p in model.named_parameters()}


def step_under_context_parallel(group, rank, hooks):
    """PyTorch cuts the buffers; with ``hooks`` the model as Accelerate prepares it for that (cp_size)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    model = model_of("decoder")
    if hooks:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)
    buffers = [tokens(WHOLE), shifted(tokens(WHOLE)), torch.arange(WHOLE)[None].clone()]
    mesh = DeviceMesh.from_group(group, "cpu")
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]), parallel.context(group):
        ids, labels, places = buffers
        loss = model(
            input_ids=ids, position_ids=places, shift_labels=labels, labels=labels, num_items_in_batch=WHOLE - 1
        ).loss
        loss.backward()
    return added_up(model, loss, group)


def step_under_ulysses(group, rank):
    """DeepSpeed's wrapper of Hugging Face models around the registered attention: heads for rows, one stretch a rank.
    It takes the name's place, which is given back."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = model_of("decoder")
    ours = ALL_ATTENTION_FUNCTIONS["dspattn_2_4"]
    UlyssesSPAttentionHF.register_with_transformers(model, "dspattn_2_4", sequence_parallel_size=2, micro_batch_size=1)
    mine = slice(rank * WHOLE // 2, (rank + 1) * WHOLE // 2)
    labels = shifted(tokens(WHOLE))[:, mine]
    loss = model(
        input_ids=tokens(WHOLE)[:, mine], position_ids=torch.arange(WHOLE)[None, mine], shift_labels=labels,
        labels=labels, num_items_in_batch=WHOLE - 1, use_cache=False,
    ).loss  # fmt: skip
    loss.backward()
    ALL_ATTENTION_FUNCTIONS["dspattn_2_4"] = ours
    return added_up(model, loss, group)


@pytest.mark.parametrize("library", ["torch", "accelerate", "deepspeed"])
def test_a_training_step_cut_by_other_libraries(pool, library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    model = model_of("decoder")
    loss = model(input_ids=tokens(WHOLE), labels=tokens(WHOLE)).loss
    loss.backward()
    step = (step_under_ulysses,) if library == "deepspeed" else (step_under_context_parallel, library == "accelerate")
    for result in pool.run(*step, size=2):
        assert not isinstance(result, Failure), result
        total, gradients = result
        assert total == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(torch.from_numpy(gradients[name]), parameter.grad, atol=2e-5 * scale, rtol=1e-4)


def refused_on_rank(group, rank, case, alone):
    model = model_of("decoder")
    inputs = {"input_ids": parallel.shard(tokens(), 1, group)}
    rows = inputs["input_ids"].shape[1]
    if alone and rank == 0:
        pass
    elif case == "padding":
        inputs["attention_mask"] = torch.ones(1, rows, dtype=torch.int64)
        inputs["attention_mask"][0, :3] = 0
    elif case == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(rows - 50), torch.arange(50)])[None]
        inputs["use_cache"] = False
    try:
        with torch.no_grad(), parallel.context(group):
            model(**inputs)
    except dspattn.DspattnError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "case, words",
    [("padding", "attention_mask: expected no padding"), ("packed", "position_ids: expected those of one")],
)
@pytest.mark.parametrize("alone", [False, True])
def test_masks_of_a_piece_alone_are_refused(pool, case, words, alone):
    """Also where one rank alone has one, and the other is on its way to attention."""
    for rank, message in enumerate(pool.run(refused_on_rank, case, alone, size=2)):
        assert message is not None and words in message
        assert ("rank 1: " in message) == (alone and rank == 0)
