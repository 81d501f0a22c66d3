// The search of a page that was opened from a disk. Browsers refuse a worker there, so it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((resolve) => {
        frame.onload = async () => {
          const inside = frame.contentWindow;
          const load = (source) => new Promise((loaded, failed) => {
            const script = inside.document.createElement("script");
            Object.assign(script, { src: source, onload: loaded, onerror: failed });
            inside.document.body.append(script);
          });
          inside.importScripts = (...sources) => Promise.all(sources.map(load));
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          await load(new URL(url, location.href).href);
          resolve(inside);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
