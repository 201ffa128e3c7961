"""Optimiser steps of one number, and what decay does in them, in plain Python."""

from __future__ import annotations

import math


class Sgd:
    """``decoupled`` shrinks the weight itself and keeps decay out of the momentum."""

    def __init__(self, rate, decay, momentum=0.0, *, decoupled=False):
        self.rate, self.decay, self.momentum, self.decoupled = rate, decay, momentum, decoupled
        self.velocity = 0.0

    def step(self, w, g):
        if not self.decoupled:
            g = g + self.decay * w
        self.velocity = self.momentum * self.velocity + g
        shrunk = w - self.rate * self.decay * w if self.decoupled else w
        return shrunk - self.rate * self.velocity


class Adam:
    """With L2 in the gradient, or with decoupled decay."""

    def __init__(self, rate, decay, *, decoupled, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.rate, self.decay, self.decoupled = rate, decay, decoupled
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.first = self.second = 0.0
        self.count = 0

    def step(self, w, g):
        self.count += 1
        if self.decoupled:
            w = w * (1 - self.rate * self.decay)
        else:
            g = g + self.decay * w
        self.first = self.beta1 * self.first + (1 - self.beta1) * g
        self.second = self.beta2 * self.second + (1 - self.beta2) * g * g
        return w - self.rate * self.corrected_first() / (math.sqrt(self.corrected_second()) + self.epsilon)

    def corrected_first(self):
        return self.first / (1 - self.beta1**self.count)

    def corrected_second(self):
        return self.second / (1 - self.beta2**self.count)


def shrinkage(make, start, gradients):
    """Relative shrinkage of one weight along its run: sum of θ (step without decay - step with it) over sum of θ².

    ``make(decay_on)`` builds an optimiser; the twin without decay starts every step from the same weight.
    """
    real, twin = make(True), make(False)
    w, taken, squares = start, 0.0, 0.0
    for g in gradients:
        without, after = twin.step(w, g), real.step(w, g)
        taken += w * (without - after)
        squares += w * w
        w = after
    return taken / squares, w, squares
