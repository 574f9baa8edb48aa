// Search in pages that are read from files: browsers start no workers there, so a worker's script runs in a frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // What the script calls when it answers, and when it wants more scripts.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      const message = () => new this.frame.contentWindow.MessageEvent("message", { data });
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(message()));
    }

    terminate() {
      this.frame.remove();
    }
  };
