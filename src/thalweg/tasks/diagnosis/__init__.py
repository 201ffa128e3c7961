"""Why a model trains or does not: what is measured, what is found in it, what to change."""
