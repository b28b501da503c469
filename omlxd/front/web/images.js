// Images that the next message takes along.

import { button, h } from "./dom.js";

const MOST_BYTES = 20 << 20;

export class Images {
  /** `refusal()` says why no image can be taken, or ""; `changed(problem)` is called after each change, without one where none was looked for. */
  constructor(refusal, changed) {
    this.refusal = refusal;
    this.changed = changed;
    this.urls = [];
    this.reading = Promise.resolve(); // Ends when all that was added is read.
    this.element = h("ul", { class: "thumbs", "aria-label": "Images of the next message", hidden: true });
  }

  /** Take those of `files` that are images. */
  add(files) {
    const all = [...files]; // A field's own list is emptied meanwhile.
    this.reading = this.reading.then(() => this.read(all));
  }

  async read(files) {
    let problem = "";
    for (const file of files) {
      if (!file.type.startsWith("image/")) problem = `${file.name} is no image.`;
      else if (this.refusal()) problem = this.refusal();
      else if (file.size > MOST_BYTES) problem = `${file.name} is larger than 20 MiB.`;
      else {
        try {
          const url = await asUrl(file);
          this.urls.push(url); // What is sent or removed meanwhile makes another list.
        } catch {
          problem = `${file.name} can't be read.`;
        }
      }
    }
    this.show(this.urls);
    this.changed(problem);
  }

  show(urls) {
    this.urls = urls;
    this.element.replaceChildren(...urls.map((url, at) => h("li", {}, h("img", { src: url, alt: `Image ${at + 1}` }),
      button("×", () => { this.show(urls.filter((_, other) => other !== at)); this.changed(); }, { class: "quiet", "aria-label": `Remove image ${at + 1}` }))));
    this.element.hidden = !urls.length;
  }
}

const asUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
