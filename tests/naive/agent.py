import torch
from torch import Tensor

from tests.naive import Case


def landmark_grid(rows: int, columns: int, landmarks: int) -> tuple[int, int]:
    """At most a quarter of the patches, about square cells."""
    count = max(1, min(landmarks, rows * columns // 4))
    across = min(rows, count, max(1, round((count * rows / columns) ** 0.5)))
    return across, min(columns, count // across)


def pool(x: Tensor, grid: tuple[int, int], prefix: int, cells: tuple[int, int]) -> Tensor:
    """Mean over rows from floor(i R / r) to ceil((i + 1) R / r), and columns alike."""
    image = x[:, :, prefix:].unflatten(2, grid)
    means = []
    for i in range(cells[0]):
        top, bottom = i * grid[0] // cells[0], -(-(i + 1) * grid[0] // cells[0])
        for j in range(cells[1]):
            left, right = j * grid[1] // cells[1], -(-(j + 1) * grid[1] // cells[1])
            means.append(image[:, :, top:bottom, left:right].mean((2, 3)))
    return torch.stack(means, 2)


def softmax(logits: Tensor, dim: int) -> Tensor:
    weights = torch.exp(logits - logits.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)


def sample(old: int, new: int, index: int) -> list[tuple[int, float]]:
    """Neighbours and weights of linear interpolation, pixel centres at half integers, edges repeated."""
    x = min(max((index + 0.5) * old / new - 0.5, 0.0), old - 1.0)
    low = int(x)
    return [(low, 1 - (x - low)), (min(low + 1, old - 1), x - low)]


def position_bias(case: Case, cells: tuple[int, int]) -> Tensor:
    """(2, heads, agents, tokens)."""
    patch, prefix = case.params["patch_bias"], case.params["prefix_bias"]
    rows, columns = case.grid
    out = torch.zeros(2, patch.shape[1], *cells, case.prefix + rows * columns, dtype=torch.float64)
    for a in range(cells[0]):
        for b in range(cells[1]):
            for i, wi in sample(patch.shape[2], cells[0], a):
                for j, wj in sample(patch.shape[3], cells[1], b):
                    out[:, :, a, b, : case.prefix] += wi * wj * prefix[:, :, i, j, None]
                    for y in range(rows):
                        for x in range(columns):
                            token = case.prefix + y * columns + x
                            for r, wr in sample(7, rows, y):
                                for c, wc in sample(7, columns, x):
                                    out[:, :, a, b, token] += wi * wj * wr * wc * patch[:, :, i, j, r, c]
    return out.flatten(2, 3)


def routing(case: Case) -> Tensor:
    cells = landmark_grid(*case.grid, case.options["landmarks"])
    agents = pool(case.q, case.grid, case.prefix, cells)
    to_keys = case.scale * torch.einsum("bhmd,bhjd->bhmj", agents, case.k)
    to_agents = case.scale * torch.einsum("bhid,bhmd->bhim", case.q, agents)
    if case.options["bias"]:
        first, second = position_bias(case, cells)
        to_keys, to_agents = to_keys + first, to_agents + second.transpose(1, 2)
    return torch.einsum("bhim,bhmj->bhij", softmax(to_agents, -1), softmax(to_keys, -1))
