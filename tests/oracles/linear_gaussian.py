"""Linear-Gaussian latent variables in numpy float64: z ~ N(0, I), x ~ N(W z + m, diag(noise))."""

import numpy as np


def log_likelihood(W, mean, noise, X):
    """log N(x; m, W W' + diag(noise)) of each row."""
    C = W @ W.T + np.diag(noise)
    apart = X - mean
    _, log_determinant = np.linalg.slogdet(2 * np.pi * C)
    return -0.5 * (log_determinant + np.einsum("nd,de,ne->n", apart, np.linalg.inv(C), apart))


def posterior(W, mean, noise, X):
    """Means (N, K) and the shared covariance (K, K) of p(z | x), by conditioning the joint Gaussian of (z, x)."""
    C = W @ W.T + np.diag(noise)
    gain = W.T @ np.linalg.inv(C)
    return (X - mean) @ gain.T, np.eye(W.shape[1]) - gain @ W


def gaussian_kl(mean, covariance, other_mean, other_covariance):
    """KL(N(mean, covariance) || N(other_mean, other_covariance))."""
    precision = np.linalg.inv(other_covariance)
    apart = other_mean - mean
    ratio = np.linalg.slogdet(other_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return 0.5 * (np.trace(precision @ covariance) + apart @ precision @ apart - len(mean) + ratio)


def ppca_maximum(X, K):
    """The greatest mean log-likelihood of probabilistic PCA with K factors (Tipping and Bishop, 1999).

    W spans the K leading eigenvectors of the covariance, the noise is the mean of the other eigenvalues.
    """
    D = X.shape[1]
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(X.T, bias=True)))[::-1]
    noise = eigenvalues[K:].mean()
    return -0.5 * (D * np.log(2 * np.pi) + np.log(eigenvalues[:K]).sum() + (D - K) * np.log(noise) + D), noise


def bound(W, mean, noise, X, means, covariances):
    """E_q[log p(x, z)] + H(q) with q = N(means, covariances), every term by its own formula."""
    D, K = W.shape
    total = []
    for x, m, S in zip(X, means, covariances, strict=True):
        apart = x - mean - W @ m
        prior = -0.5 * (K * np.log(2 * np.pi) + m @ m + np.trace(S))
        spread = np.diag(W @ S @ W.T)
        fit = -0.5 * (D * np.log(2 * np.pi) + np.log(noise).sum() + ((apart**2 + spread) / noise).sum())
        total.append(prior + fit + 0.5 * np.linalg.slogdet(2 * np.pi * np.e * S)[1])
    return np.array(total)
