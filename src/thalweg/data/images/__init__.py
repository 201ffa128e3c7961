"""Images: files, decoding, cache, batches, augmentation."""
