"""A slow float64 ARO written from spec.md alone: numpy, one matrix, loops. The tests' yardstick.

It knows nothing of the package. Its QR has no ladder: a test must stay where none is climbed.
"""

from __future__ import annotations

import numpy as np


def sinkhorn(x: np.ndarray, iterations: int) -> np.ndarray:
    x = x.copy()
    for _ in range(iterations):
        rows = [np.sqrt(sum(v * v for v in row)) for row in x]
        columns = [np.sqrt(sum(v * v for v in column)) for column in x.T]
        for i, r in enumerate(rows):
            for j, c in enumerate(columns):
                x[i, j] = 0.0 if r == 0 or c == 0 else x[i, j] / r / c
    return x


def rownorm(x: np.ndarray) -> np.ndarray:
    result = np.zeros_like(x)
    for i, row in enumerate(x):
        if np.any(row):
            result[i] = np.sqrt(len(row)) * row / np.linalg.norm(row)
    return result


def orthonormalize(a: np.ndarray, qr: str) -> np.ndarray:
    if qr == "qr":
        return np.linalg.qr(a)[0]
    k = a.shape[1]
    for shift in [1e-7] if qr == "scqr" else [1e-7, 1e-7 / k]:
        p = a.T @ a
        lower = np.linalg.cholesky(p + shift * np.trace(p) * np.eye(k))
        a = np.linalg.solve(lower, a.T).T
    return a


def retract(z: np.ndarray) -> np.ndarray:
    """QR whose upper factor has a positive diagonal."""
    q, upper = np.linalg.qr(z)
    return q * np.sign(np.diag(upper))


class Reference:
    """State and steps of one oriented matrix, m x n, rows rotated."""

    def __init__(self, w: np.ndarray, projection: str, rotation: str, qr: str) -> None:
        m, n = w.shape
        k = min(m, n)
        self.w, self.projection, self.rotation, self.qr = w.copy(), projection, rotation, qr
        self.momentum, self.r = np.zeros((m, n)), np.eye(m)[:, :k]
        self.v = np.zeros((m if rotation == "none" else k, n))
        self.condition = 1.0  # the worst of any A so far: how well determined the rotations are
        self.margin = 1.0  # the smallest |X| / max |X| so far: how well determined signs are

    def project(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = x.copy()
        whole = np.linalg.norm(x)
        for j in range(x.shape[1]):
            if np.linalg.norm(x[:, j]) < 1e-7 * whole:
                x[:, j] = 0
        v = 0.95 * self.v + 0.05 * x * x
        f = {
            "sinkhorn": lambda: sinkhorn(x, 5),
            "rownorm": lambda: rownorm(x),
            "sign": lambda: np.sign(x),
            "adam": lambda: x / (np.sqrt(v) + 1e-8),
        }[self.projection]()
        self.margin = min(self.margin, np.abs(x).min() / (np.abs(x).max() or 1.0))
        return f, v

    def into_frame(self) -> np.ndarray:
        x = self.r.T @ self.momentum
        threshold = 2 * 1.1e-16 / np.sqrt(len(self.momentum)) * np.linalg.norm(self.momentum)
        for i in range(len(x)):
            if np.linalg.norm(x[i]) < threshold:
                x[i] = 0
        return x

    def climb(self) -> np.ndarray:
        """Ten steps from R, the last of them not retracted."""
        before = self.r
        for _ in range(9):
            self.r = retract(self.step_up())
        moved, self.r = self.step_up(), before
        return moved

    def step_up(self) -> np.ndarray:
        a = self.momentum @ self.project(self.into_frame())[0].T
        inner = self.r.T @ a
        tangent = a - self.r @ (inner + inner.T) / 2
        return self.r + tangent / np.sum(np.linalg.svd(a, compute_uv=False) ** 4) ** 0.25

    def step(self, g: np.ndarray, lr: float = 1e-2, weight_decay: float = 0.1) -> np.ndarray:
        self.momentum = 0.95 * self.momentum + 0.05 * g
        if self.rotation == "none":
            d, self.v = self.project(self.momentum)
        else:
            if np.any(self.momentum):
                if self.rotation == "rgd":
                    a = self.climb()
                else:
                    x = self.into_frame()
                    a = self.momentum @ (x if self.rotation == "eigen" else self.project(x)[0]).T
                self.condition = max(self.condition, np.linalg.cond(a))
                if self.rotation == "polar":
                    u, _, vt = np.linalg.svd(a, full_matrices=False)
                    self.r = u @ vt
                else:
                    self.r = orthonormalize(a, self.qr)
            f, self.v = self.project(self.into_frame())
            d = self.r @ f
        size = np.linalg.norm(d)
        update = 0.2 * np.sqrt(d.size) * d / size if size else np.zeros_like(d)
        self.w = (1 - lr * weight_decay) * self.w - lr * update
        return self.w
