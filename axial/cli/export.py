"""Exports a run: its network with folded batch norms, as a SavedModel or in one file.

%s --model_dir=RUN --output_dir=EXPORT                                  a SavedModel for photos of any size
%s --model_dir=RUN --output_dir=EXPORT --jit_compile                    XLA compiles its network
%s --model_dir=RUN --output_dir=EXPORT --format=tflite                  TFLite, float32
%s --model_dir=RUN --output_dir=EXPORT --format=tflite --maps --precision=int8 --data_dir=DATA
%s --model_dir=RUN --output_dir=EXPORT --format=onnx
%s --model_dir=RUN --output_dir=EXPORT --format=onnx --maps      only the network
%s --model_dir=RUN --output_dir=EXPORT --average=5      the mean of the run's last five checkpoints
%s --model_dir=RUN --output_dir=WEIGHTS --format=safetensors      for axial.load

A TFLite or ONNX file takes the pixels of a photo of any size, and returns the segments, objects or classes. With --maps
it takes one canvas and returns the network's output maps; axial-predict and axial-evaluate then scale the photos and
group the maps. int8 needs --maps. The command ends with a comparison of the export and the checkpoint on a few photos.
It deletes an export that returns NaN or infinity. The SavedModel of a translator takes texts; loading it needs
tensorflow_text.

Each export has a card, README.md: input and output, scores and their splits, licence, commands. It shows the scores by
which the checkpoint was chosen. --license adds the licence of the weights.

If the run scales all photos by one factor, the export does too, and has only the largest canvas. axial-predict,
axial-evaluate and the signatures of a SavedModel cut larger photos into tiles.
"""

from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed
from axial.io.gfile import check_plain


class Export(Flags):
    model_dir = flags.MODEL_DIR.but(meaning="a run of axial-train, or the name of a shipped model.", needed=True)
    checkpoint = flags.CHECKPOINT
    average = flags.AVERAGE
    output_dir = Flag(str, "new folder for the export.", path=flags.NEW_FOLDER, needed=True)
    format = Flag(str, "format of the export.", "saved_model", choices=("saved_model", "tflite", "onnx", "safetensors"))
    jit_compile = Flag(bool, "lets XLA compile the network of the SavedModel at its first call.", False)
    precision = Flag(str, "type of the weights in a TFLite file.", "float32", choices=("float32", "float16", "int8"))
    maps = Flag(bool, "writes only the network to a TFLite or ONNX file: from a canvas to its output maps.", False)
    data_dir = flags.DATA_DIR
    gin_binding = flags.GIN_BINDING
    license = Flag(str, "licence of the weights for the card, by its name on the Hugging Face hub, like cc-by-4.0.")

    def check(self):
        if self.precision != "float32" and self.format != "tflite":
            raise InputError(f"--precision={self.precision} needs --format=tflite")
        if self.precision == "int8" and not self.maps:
            raise InputError("--precision=int8 needs --maps: 8 bits are too few for the positions of the grouping")
        if self.maps and self.format not in ("tflite", "onnx"):
            raise InputError(f"--maps does not go with --format={self.format}: it is for TFLite and ONNX files")
        if self.jit_compile and self.format != "saved_model":
            raise InputError(f"--jit_compile does not go with --format={self.format}: it is for a SavedModel")
        if self.format == "safetensors" and self.data_dir:
            raise InputError("--data_dir does not go with --format=safetensors: its tensors are compared, not photos")
        if self.format == "onnx":
            check_installed("ONNX needs", "onnx", "tf2onnx", "onnxruntime")
        if self.format == "saved_model":
            check_plain(self.output_dir)

    def look(self):
        super().look()
        flags.check_run(self.model_dir, self.gin_binding)


def main():
    app.run({"": (Export, "axial.cli.export_files.run")})
