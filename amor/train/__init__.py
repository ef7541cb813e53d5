"""From batches to a trained model: recipe, optimiser, step, checkpoints, and the loop that ties
them together.
"""
