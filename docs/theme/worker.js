// Browsers start no workers for pages that are opened from a folder. There the search runs in a
// hidden frame instead, so that the documentation can be searched without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = (this.inner = frame.contentWindow);
      this.ready = new Promise((resolve, reject) => {
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inner.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        inner.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
