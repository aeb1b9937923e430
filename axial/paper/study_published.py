"""Accuracies and GFLOPs that Zhu et al., ICCV 2019, print in Tables 2 and 3. One FLOP is one multiply-add.

A row is (setting, window, deformable) with a score and GFLOPs for each task. Windows are the kernel sizes of Table 3.
"""

TASKS = ("detection", "segmentation", "nmt")
MEMORY = "nmt encoder-decoder"  # of Fig. 3 alone: encoder-decoder attention changes, self-attention stays 1111
SCORES = {"detection": "box mAP", "segmentation": "mIoU", "nmt": "BLEU"}
DATA = {"detection": "COCO val2017", "segmentation": "Cityscapes val", "nmt": "WMT14 En-De"}

# (setting, window, deformable): ((mAP, GFLOPs), (mIoU, GFLOPs), (BLEU, GFLOPs))
TABLE_2 = {
    ("none", None, False): ((36.4, 213.7), (71.9, 449.5), (20.9, 1.7)),
    ("1111", None, False): ((38.8, 281.4), (76.7, 1112.1), (27.7, 2.7)),
    ("1110", None, False): ((38.8, 281.4), (76.7, 1112.1), (27.7, 2.7)),
    ("1101", None, False): ((38.8, 281.4), (76.7, 1112.1), (27.7, 2.7)),
    ("1100", None, False): ((38.8, 281.4), (76.7, 1112.1), (27.7, 2.7)),
    ("0111", None, False): ((38.8, 253.6), (76.6, 814.0), (27.6, 2.7)),
    ("0110", None, False): ((38.8, 253.6), (76.6, 814.0), (27.6, 2.7)),
    ("0101", None, False): ((38.6, 251.1), (76.3, 800.7), (27.4, 2.6)),
    ("0100", None, False): ((38.6, 251.1), (76.3, 800.7), (27.4, 2.6)),
    ("1111", None, True): ((41.0, 281.4), (77.8, 1112.1), (28.0, 3.2)),
    ("1011", None, True): ((41.0, 281.4), (77.8, 1112.1), (28.0, 3.2)),
    ("1010", None, True): ((40.9, 281.2), (77.7, 1111.2), (28.0, 2.9)),
    ("1001", None, True): ((41.0, 281.4), (77.8, 1112.1), (28.0, 3.2)),
    ("1000", None, True): ((40.9, 281.2), (77.7, 1111.2), (28.0, 2.9)),
    ("0011", None, True): ((41.0, 250.1), (77.5, 794.4), (27.7, 3.0)),
    ("0010", None, True): ((40.8, 221.1), (77.3, 489.5), (27.7, 2.7)),
    ("0001", None, True): ((40.7, 247.6), (77.3, 781.1), (27.6, 2.9)),
    ("none", None, True): ((39.9, 213.7), (77.2, 449.5), (27.3, 2.2)),
}
TABLE_3 = {
    ("0100", 31, False): ((38.6, 229.4), (75.5, 523.3), (27.4, 2.4)),
    ("0100", 25, False): ((38.6, 226.6), (75.5, 511.8), (27.4, 2.3)),
    ("0100", 19, False): ((38.6, 224.4), (75.4, 502.6), (27.4, 2.3)),
    ("0100", 13, False): ((38.5, 222.7), (74.4, 495.9), (27.3, 2.3)),
    ("dynamic", 31, False): ((37.9, 352.9), (74.2, 1029.0), (27.6, 2.4)),
    ("dynamic", 25, False): ((37.8, 306.8), (74.2, 840.4), (27.6, 2.3)),
    ("dynamic", 19, False): ((37.6, 270.6), (73.7, 692.1), (27.5, 2.3)),
    ("dynamic", 13, False): ((37.5, 244.3), (71.9, 584.3), (27.4, 2.3)),
}
