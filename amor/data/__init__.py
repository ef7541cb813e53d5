"""Text -> tokens -> batches: prepare writes shards, Shards opens them, Batches hands them out in a
fixed order.
"""
