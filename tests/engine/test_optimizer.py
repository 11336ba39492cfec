import torch

from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.engine.optimizer import StackedAdamW, flatten, unflatten


def small_stack():
    generator = torch.Generator().manual_seed(0)
    A = {name: torch.randn(3, 2, 5, generator=generator) for name in ("one", "two")}
    B = {name: torch.randn(3, 4, 2, generator=generator) for name in ("one", "two")}
    return AdapterStack(AdapterSpec(rank=2), "test", A, B)


def test_rows_and_stack_are_the_same_memory():
    stack = small_stack()
    rows = flatten(stack)
    views = unflatten(rows, stack)
    assert rows.shape == (3, stack.num_parameters)
    assert all(torch.equal(views.A[layer], stack.A[layer]) for layer in stack.layers)
    assert all(torch.equal(views.B[layer], stack.B[layer]) for layer in stack.layers)
    rows[1] = 7.0
    assert (views.B["two"][1] == 7.0).all()
    assert (stack.B["two"][1] != 7.0).any(), "the stack that was given is left alone"


def test_steps_equal_those_of_torch_for_each_world_and_leave_finished_worlds_alone():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 10, generator=generator)
    alone = [rows[world].clone().requires_grad_() for world in range(3)]
    references = [torch.optim.AdamW([leaf], lr=0.01, weight_decay=0.1) for leaf in alone]
    optimizer = StackedAdamW(rows.clone(), learning_rate=0.01, weight_decay=0.1)
    for unfinished in (3, 3, 3, 2, 2, 1, 1, 1):
        gradient = torch.randn(unfinished, 10, generator=generator) * 10.0 ** torch.arange(-6.0, 4.0)
        before = optimizer.rows.clone(), optimizer.first.clone(), optimizer.second.clone()
        optimizer.step(gradient)
        for world in range(unfinished):
            alone[world].grad = gradient[world].clone()
            references[world].step()
        for now, then in zip((optimizer.rows, optimizer.first, optimizer.second), before, strict=True):
            assert torch.equal(now[unfinished:], then[unfinished:])
            assert not torch.equal(now[:unfinished], then[:unfinished])
    for world in range(3):
        assert torch.allclose(optimizer.rows[world], alone[world].detach(), rtol=1e-6, atol=1e-7)
