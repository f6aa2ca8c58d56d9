"""Images: data sets, decoding and augmentation."""
